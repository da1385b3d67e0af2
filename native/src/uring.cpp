// See uring.hpp. The memory order of the shared indices follows io_uring(7): an index written by the
// kernel is read with acquire, one written for the kernel is stored with release.
#if !defined(LOHAN_WITHOUT_URING) && defined(__linux__) && __has_include(<linux/io_uring.h>)

#include "lohan/uring.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

// The numbers are the same on every architecture; old headers lack the names.
#ifndef __NR_io_uring_setup
#define __NR_io_uring_setup 425
#define __NR_io_uring_enter 426
#endif

namespace lohan {

namespace {

std::uint32_t load(const std::uint32_t *index) { return __atomic_load_n(index, __ATOMIC_ACQUIRE); }
void store(std::uint32_t *index, std::uint32_t value) { __atomic_store_n(index, value, __ATOMIC_RELEASE); }

template <typename T>
T *at(void *start, std::size_t offset) {
    return reinterpret_cast<T *>(static_cast<char *>(start) + offset);
}

}  // namespace

Ring::Ring(std::uint32_t num_entries) {
    io_uring_params params;
    std::memset(&params, 0, sizeof params);
    descriptor_ = static_cast<int>(::syscall(__NR_io_uring_setup, num_entries, &params));
    if (descriptor_ < 0) throw std::system_error(errno, std::generic_category(), "io_uring_setup");
    try {
        submissions_ = map(params.sq_off.array + params.sq_entries * sizeof(std::uint32_t), IORING_OFF_SQ_RING);
        completions_ = map(params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING);
        entries_ = map(params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
    } catch (...) {
        unmap();
        throw;
    }
    submission_head_ = at<std::uint32_t>(submissions_.address, params.sq_off.head);
    submission_tail_ = at<std::uint32_t>(submissions_.address, params.sq_off.tail);
    submission_index_ = at<std::uint32_t>(submissions_.address, params.sq_off.array);
    submission_mask_ = *at<std::uint32_t>(submissions_.address, params.sq_off.ring_mask);
    completion_head_ = at<std::uint32_t>(completions_.address, params.cq_off.head);
    completion_tail_ = at<std::uint32_t>(completions_.address, params.cq_off.tail);
    completion_entries_ = at<io_uring_cqe>(completions_.address, params.cq_off.cqes);
    completion_mask_ = *at<std::uint32_t>(completions_.address, params.cq_off.ring_mask);
    local_tail_ = load(submission_tail_);
}

Ring::~Ring() { unmap(); }

Ring::Mapping Ring::map(std::size_t nbytes, std::uint64_t offset) {
    void *address = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor_,
                           static_cast<off_t>(offset));
    if (address == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of io_uring");
    return {address, nbytes};
}

void Ring::unmap() {
    for (const auto &mapping : {submissions_, completions_, entries_})
        if (mapping.address != nullptr) ::munmap(mapping.address, mapping.nbytes);
    if (descriptor_ >= 0) ::close(descriptor_);
}

io_uring_sqe *Ring::next_entry() {
    const auto index = local_tail_ & submission_mask_;
    auto *entry = static_cast<io_uring_sqe *>(entries_.address) + index;
    std::memset(entry, 0, sizeof *entry);
    submission_index_[index] = index;
    ++local_tail_;
    return entry;
}

int Ring::enter() {
    store(submission_tail_, local_tail_);
    const auto num_queued = local_tail_ - load(submission_head_);
    const auto result = ::syscall(__NR_io_uring_enter, descriptor_, num_queued, 1u, IORING_ENTER_GETEVENTS,
                                  nullptr, std::size_t{0});
    return result < 0 ? errno : 0;
}

std::optional<Ring::Completion> Ring::pop() {
    const auto head = *completion_head_;
    if (head == load(completion_tail_)) return std::nullopt;
    const auto &entry = completion_entries_[head & completion_mask_];
    const Completion completion{entry.user_data, entry.res};
    store(completion_head_, head + 1);
    return completion;
}

std::vector<std::uint64_t> Ring::take_back_unsubmitted() {
    std::vector<std::uint64_t> taken;
    const auto head = load(submission_head_);
    for (auto index = head; index != local_tail_; ++index)
        taken.push_back(static_cast<io_uring_sqe *>(entries_.address)[index & submission_mask_].user_data);
    local_tail_ = head;
    store(submission_tail_, local_tail_);
    return taken;
}

}  // namespace lohan

#endif
