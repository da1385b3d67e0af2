// Runs pieces of an index range on several threads, under a known floating-point environment.
// Knows nothing of what a piece does. Used by kernel_calls.cpp.
#pragma once

#include <cstddef>
#include <functional>

namespace lohan {

// While it lives, the calling thread rounds to nearest even and keeps denormals, whatever a
// library loaded earlier has set (flush-to-zero would change results).
class DefaultFloatEnvironment {
   public:
    DefaultFloatEnvironment();
    ~DefaultFloatEnvironment();
    DefaultFloatEnvironment(const DefaultFloatEnvironment &) = delete;
    DefaultFloatEnvironment &operator=(const DefaultFloatEnvironment &) = delete;

   private:
    unsigned long long saved_;
};

// Calls work(begin, end) until [0, num_elements) is covered once, in pieces of `piece_elements`
// (the last one may be shorter), on the calling thread and up to num_threads - 1 others.
//
// Runs on: the caller and threads that end before it returns. May block: yes, until all is done.
// Owns until: `work` must not throw and must tolerate any order and any thread of its pieces.
// If the system refuses a thread, the others do its share.
void for_each_piece(std::size_t num_elements, std::size_t piece_elements, unsigned num_threads,
                    const std::function<void(std::size_t, std::size_t)> &work);

}  // namespace lohan
