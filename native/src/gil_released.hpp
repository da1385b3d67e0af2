// Gives the interpreter's lock up for a scope. Used by the bindings, around calls that may block.
//
// Not nanobind's own guard, because of how a program ends: a daemon thread that wants the lock back
// while the interpreter is shutting down is ended by pthread_exit (Python before 3.14), which unwinds
// through C++ and aborts the whole process in the first destructor. Here such a thread stands still
// instead, as it does in newer versions of Python, and the process ends as its main thread wants.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace lohan {

class GilReleased {
   public:
    GilReleased() : state_(PyEval_SaveThread()) {}
    ~GilReleased() {
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {
            // Leaving this block would abort; the end of the process ends it.
            while (true) ::pause();
        }
    }
    GilReleased(const GilReleased &) = delete;
    GilReleased &operator=(const GilReleased &) = delete;

   private:
    PyThreadState *state_;
};

}  // namespace lohan
