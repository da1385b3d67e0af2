#include "lohan/tiles.hpp"

#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#ifdef __x86_64__
#include <cpuid.h>
#endif

namespace lohan {
namespace {

constexpr unsigned kMostSeconds = 5;

bool processor_has_tiles() {
#ifdef __x86_64__
    constexpr unsigned kTilesWithBf16 = 1u << 24 | 1u << 22;
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) &&
           (edx & kTilesWithBf16) == kTilesWithBf16;
#else
    return false;
#endif
}

}  // namespace

std::string fate_in_child(void (*work)(), unsigned num_seconds) {
    const pid_t child = fork();
    if (child < 0) return std::string("no process for a try: ") + std::strerror(errno);
    if (child == 0) {
        // As a fresh process would be: no handlers of the parent, nothing blocked. Its small signal
        // stack would make the kernel refuse the tiles. A death here is no cause for a core file.
        prctl(PR_SET_DUMPABLE, 0);
        stack_t no_stack{};
        no_stack.ss_flags = SS_DISABLE;
        sigaltstack(&no_stack, nullptr);
        for (const int number : {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGALRM})
            std::signal(number, SIG_DFL);
        sigset_t nothing;
        sigemptyset(&nothing);
        sigprocmask(SIG_SETMASK, &nothing, nullptr);
        alarm(num_seconds);
        work();
        _exit(0);
    }
    int status = 0;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR) return std::string("a try nobody could watch: ") + std::strerror(errno);
    if (!WIFSIGNALED(status)) return "";
    if (WTERMSIG(status) == SIGALRM) return "no end after " + std::to_string(num_seconds) + " s";
    return strsignal(WTERMSIG(status));
}

void use_tiles() {
#ifdef __x86_64__
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
    syscall(SYS_arch_prctl, kRequestPermission, kTileData);      // refused: the tiles end it
    alignas(64) unsigned char shapes[64] = {1};                  // palette 1, then what is set here
    for (int tile = 0; tile < 3; ++tile) {
        shapes[16 + 2 * tile] = 64;  // bytes per row
        shapes[48 + tile] = 16;      // rows
    }
    // In bytes, for compilers and assemblers that do not know them.
    asm volatile(
        ".byte 0xc4, 0xe2, 0x78, 0x49, 0x00\n\t"  // ldtilecfg (%rax)
        ".byte 0xc4, 0xe2, 0x7b, 0x49, 0xc0\n\t"  // tilezero %tmm0
        ".byte 0xc4, 0xe2, 0x7b, 0x49, 0xc8\n\t"  // tilezero %tmm1
        ".byte 0xc4, 0xe2, 0x7b, 0x49, 0xd0\n\t"  // tilezero %tmm2
        ".byte 0xc4, 0xe2, 0x6a, 0x5c, 0xc1\n\t"  // tdpbf16ps %tmm2, %tmm1, %tmm0
        ".byte 0xc4, 0xe2, 0x78, 0x49, 0xc0"      // tilerelease
        :
        : "a"(shapes)
        : "memory");
#endif
}

std::string probe_tiles() {
    if (!processor_has_tiles()) return "none";
    const std::string fate = fate_in_child(use_tiles, kMostSeconds);
    return fate.empty() ? "run" : fate;
}

}  // namespace lohan
