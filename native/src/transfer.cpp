// See transfer.hpp.
#include "lohan/transfer.hpp"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <utility>

namespace lohan {

File::File(std::string path, int descriptor, int drive, bool is_direct)
    : path_(std::move(path)), descriptor_(descriptor), drive_(drive), is_direct_(is_direct) {}

File::~File() { ::close(descriptor_); }

bool Ticket::wait_for(double seconds) const {
    if (is_done()) return true;
    std::unique_lock<std::mutex> lock(mutex_);
    // system_clock: waits on the steady clock use a call that thread sanitizers of this age do not see.
    const auto until = std::chrono::system_clock::now() + std::chrono::duration<double>(seconds);
    return changed_.wait_until(lock, std::chrono::time_point_cast<std::chrono::system_clock::duration>(until),
                               [&] { return is_done(); });
}

void Ticket::complete(const Outcome &outcome) {
    const std::lock_guard<std::mutex> lock(mutex_);
    outcome_ = outcome;
    is_done_.store(true, std::memory_order_release);
    changed_.notify_all();
}

// Note "judging a result". A positive count is progress only if it goes beyond what was there before.
// A count that is not a multiple of the alignment (the file ends there, or will grow) is continued from
// the last aligned byte, because direct I/O refuses an unaligned start; if that gives nothing new, the
// transfer has ended short for good. A count above what was asked is a lie and an error.
Transfer::Verdict Transfer::judge(std::int64_t result) {
    if (result == -EINTR || result == -EAGAIN) {
        if (++num_retries <= kMaxRetries) return Verdict::kRetry;
        error_number = static_cast<int>(-result);
        return Verdict::kFailed;
    }
    if (result < 0) {
        error_number = static_cast<int>(-result);
        return Verdict::kFailed;
    }
    if (block.operation == Operation::kFlush) {
        if (result == 0) return Verdict::kDone;
        error_number = EIO;
        return Verdict::kFailed;
    }
    if (static_cast<std::uint64_t>(result) > attempt_bytes()) {
        error_number = EIO;
        return Verdict::kFailed;
    }
    const auto reached = position + static_cast<std::uint64_t>(result);
    if (reached <= got) {
        is_short = true;
        return Verdict::kFailed;
    }
    got = reached;
    if (got == block.nbytes) return Verdict::kDone;
    num_retries = 0;
    position = got - got % kAlignmentBytes;
    return Verdict::kContinue;
}

}  // namespace lohan
