// What travels through an engine: files, tickets, and one block on its way to or from a drive.
// Owns the rule for judging a completion. Knows neither threads nor rings; both engines use it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "lohan/drive_queue.hpp"

namespace lohan {

// Direct I/O needs offsets, lengths and addresses that are multiples of this (and all our requests are).
constexpr std::uint64_t kAlignmentBytes = 4096;
// EINTR and EAGAIN without any progress in between, before they are believed.
constexpr int kMaxRetries = 1000;

// An open file. The descriptor closes when the last request on it is done and its owner let go of it.
class File {
   public:
    File(std::string path, int descriptor, int drive, bool is_direct);
    ~File();
    File(const File &) = delete;
    File &operator=(const File &) = delete;

    const std::string &path() const { return path_; }
    int descriptor() const { return descriptor_; }
    int drive() const { return drive_; }
    bool is_direct() const { return is_direct_; }

   private:
    std::string path_;
    int descriptor_;
    int drive_;
    bool is_direct_;
};

// How a request ended. `got_bytes` is the whole, gapless part from the request's start.
struct Outcome {
    int error_number = 0;
    bool is_short = false;
    std::uint64_t got_bytes = 0;

    bool is_good() const { return error_number == 0 && !is_short; }
};

// One per request. Any thread may wait for it, any number of times, also after the engine is gone.
class Ticket {
   public:
    // Runs on: any thread. May block: no.
    bool is_done() const { return is_done_.load(std::memory_order_acquire); }
    // Runs on: any thread. May block: yes, until done or the time is up. True when done.
    bool wait_for(double seconds) const;
    // Only meaningful once done.
    const Outcome &outcome() const { return outcome_; }
    // Runs on: the drive's thread, once, as the very last thing that happens to the request.
    void complete(const Outcome &outcome);

   private:
    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    std::atomic<bool> is_done_{false};
    Outcome outcome_;
};

// One block between the queue and the kernel. Owned by the one thread that moves it.
struct Transfer {
    enum class Verdict { kDone, kContinue, kRetry, kFailed };

    Block block;
    std::shared_ptr<File> file;
    std::uint64_t offset = 0;   // in the file, of the block's first byte
    char *address = nullptr;    // of the block's first byte
    std::uint64_t position = 0; // where the next attempt starts, counted from the block's first byte
    std::uint64_t got = 0;      // gapless bytes moved so far
    int num_retries = 0;
    int error_number = 0;
    bool is_short = false;

    std::uint64_t attempt_bytes() const { return block.nbytes - position; }
    // Judges the result of one attempt: a byte count, or minus an errno. See note "judging a result".
    Verdict judge(std::int64_t result);
};

}  // namespace lohan
