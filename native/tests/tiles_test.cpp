// needs: tiles.cpp
// Tries in a process of their own: each way to end is told apart, and the parent lives on.
#include "lohan/tiles.hpp"

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>

using namespace lohan;

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                        \
        }                                                                        \
    } while (0)

int main() {
    const auto nothing = [] {};
    const auto hang = [] {
        while (true) pause();
    };
    CHECK(fate_in_child(nothing, 5).empty());
    CHECK(fate_in_child([] { raise(SIGILL); }, 5) == "Illegal instruction");
    CHECK(fate_in_child([] { raise(SIGKILL); }, 5) == "Killed");
    CHECK(fate_in_child(hang, 1) == "no end after 1 s");

    // What the parent does with signals is not what the child does.
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    std::signal(SIGILL, SIG_IGN);
    CHECK(fate_in_child([] { raise(SIGILL); }, 5) == "Illegal instruction");
    CHECK(fate_in_child(hang, 1) == "no end after 1 s");

    // Somebody else takes the child's end: not known is not well.
    std::signal(SIGCHLD, SIG_IGN);
    CHECK(!fate_in_child(nothing, 5).empty());
    std::signal(SIGCHLD, SIG_DFL);

    // Where the processor has no tiles they must end a try as they end one where they do not run.
    const std::string fate = fate_in_child(use_tiles, 5), found = probe_tiles();
    CHECK(found != "none" || fate == "Illegal instruction");
    CHECK(found == "none" || (found == "run" ? fate.empty() : fate == found));
    std::printf("tiles: %s\n", found.c_str());
}
