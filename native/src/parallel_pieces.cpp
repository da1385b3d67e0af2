#include "parallel_pieces.hpp"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace lohan {

DefaultFloatEnvironment::DefaultFloatEnvironment() : saved_(0) {
#if defined(__x86_64__)
    saved_ = _mm_getcsr();
    _mm_setcsr(0x1F80);
#elif defined(__aarch64__)
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(0ull));
#endif
}

DefaultFloatEnvironment::~DefaultFloatEnvironment() {
#if defined(__x86_64__)
    _mm_setcsr(static_cast<unsigned>(saved_));
#elif defined(__aarch64__)
    asm volatile("msr fpcr, %0" : : "r"(saved_));
#endif
}

void for_each_piece(std::size_t num_elements, std::size_t piece_elements, unsigned num_threads,
                    const std::function<void(std::size_t, std::size_t)> &work) {
    const std::size_t num_pieces = (num_elements + piece_elements - 1) / piece_elements;
    std::atomic<std::size_t> next_piece{0};
    // Pieces are claimed, not dealt: a thread that loses its core does not hold the others up.
    const auto run = [&] {
        const DefaultFloatEnvironment environment;
        for (;;) {
            const std::size_t piece = next_piece.fetch_add(1, std::memory_order_relaxed);
            if (piece >= num_pieces) return;
            const std::size_t begin = piece * piece_elements;
            work(begin, std::min(num_elements, begin + piece_elements));
        }
    };
    const std::size_t num_others =
        num_pieces == 0 ? 0 : std::min<std::size_t>(num_threads, num_pieces) - 1;
    std::vector<std::thread> others;
    others.reserve(num_others);
    try {
        for (std::size_t i = 0; i < num_others; ++i) others.emplace_back(run);
    } catch (const std::system_error &) {
        // No more threads to be had: those that started, and this one, do all the pieces.
    }
    run();
    for (std::thread &other : others) other.join();
}

}  // namespace lohan
