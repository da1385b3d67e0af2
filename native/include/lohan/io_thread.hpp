// Threads of the I/O engines: named, and deaf to signals so that those reach the main thread.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <time.h>

#include <algorithm>
#include <thread>
#include <utility>

namespace lohan {

template <typename Body>
std::thread start_io_thread(Body body) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        std::thread thread(std::move(body));
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        pthread_setname_np(thread.native_handle(), "lohan-io");
        return thread;
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
    }
}

// After EINTR or EAGAIN: at once the first time, then up to a millisecond. With the bound on retries
// a drive that only ever says EAGAIN fails after about a second.
inline void pause_before_retry(int num_retries) {
    if (num_retries < 2) return;
    const timespec pause{0, 1000L * std::min(num_retries * 10, 1000)};
    nanosleep(&pause, nullptr);
}

}  // namespace lohan
