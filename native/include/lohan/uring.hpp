// The two rings shared with the kernel, and nothing else. Used by one thread (mover_uring.cpp).
// Include only where <linux/io_uring.h> exists.
#pragma once

#include <linux/io_uring.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace lohan {

class Ring {
   public:
    struct Completion {
        std::uint64_t user_data;
        std::int32_t result;
    };

    // Throws std::system_error with the errno of the call that was refused.
    explicit Ring(std::uint32_t num_entries);
    ~Ring();
    Ring(const Ring &) = delete;
    Ring &operator=(const Ring &) = delete;

    // A cleared entry, queued for the next `enter`. There is always one: callers keep at most
    // `num_entries` requests between `next_entry` and `pop`.
    io_uring_sqe *next_entry();
    // Submits what is queued and waits for one completion. Returns 0 or an errno.
    int enter();
    std::optional<Completion> pop();
    // Takes entries back that the kernel has not accepted; returns their user_data.
    std::vector<std::uint64_t> take_back_unsubmitted();

   private:
    struct Mapping {
        void *address = nullptr;
        std::size_t nbytes = 0;
    };

    Mapping map(std::size_t nbytes, std::uint64_t offset);
    void unmap();

    int descriptor_ = -1;
    Mapping submissions_;
    Mapping completions_;
    Mapping entries_;
    // Shared with the kernel: read with acquire, written with release.
    std::uint32_t *submission_head_ = nullptr;
    std::uint32_t *submission_tail_ = nullptr;
    std::uint32_t *submission_index_ = nullptr;
    std::uint32_t submission_mask_ = 0;
    std::uint32_t *completion_head_ = nullptr;
    std::uint32_t *completion_tail_ = nullptr;
    io_uring_cqe *completion_entries_ = nullptr;
    std::uint32_t completion_mask_ = 0;
    std::uint32_t local_tail_ = 0;
};

}  // namespace lohan
