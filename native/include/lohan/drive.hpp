// One drive: the queue in front of the kernel and the requests that are not finished.
// `Drive` keeps the books and is shared by both engines; what moves the bytes is a `Mover`
// (mover_threads.cpp, mover_uring.cpp) that takes transfers from it and reports how they ended.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "lohan/drive_queue.hpp"
#include "lohan/transfer.hpp"

namespace lohan {

struct DriveCounters {
    std::uint64_t num_started = 0;    // requests accepted
    std::uint64_t num_finished = 0;   // requests whose ticket is done, failed ones included
    std::uint64_t num_failed = 0;     // of those, the ones that failed
    std::uint64_t num_blocks = 0;     // blocks given to the kernel
    std::uint64_t num_continued = 0;  // short transfers that were continued
    std::uint64_t num_retried = 0;    // EINTR and EAGAIN
    std::uint64_t read_bytes = 0;
    std::uint64_t written_bytes = 0;
    std::uint32_t max_in_flight = 0;  // most blocks ever in flight together
};

class Drive {
   public:
    explicit Drive(const DriveSettings &settings);

    // Runs on: any thread. May block: no. Owns until: the ticket is done, the memory belongs to the drive.
    // Gives nothing back once `stop` was called.
    std::shared_ptr<Ticket> start(Operation operation, std::shared_ptr<File> file, std::uint64_t offset,
                                  char *address, std::uint64_t nbytes, int priority);
    // Runs on: a mover's thread. May block: no. The next block to move, if the queue lets one go.
    std::optional<Transfer> take();
    // As `take`, but waits. Nothing comes back only when the drive has stopped and all is finished.
    std::optional<Transfer> wait_and_take();
    // Runs on: a mover's thread, with the result of one attempt. May block: no. When it returns false the
    // transfer is over and the ticket may be done: the memory must not be touched again.
    bool report(Transfer &transfer, std::int64_t result);
    // Runs on: any thread. Refuses further requests; those accepted are carried out.
    void stop();
    bool is_stopped_and_idle() const;

    DriveCounters counters() const;
    const DriveSettings &settings() const { return settings_; }

    // Test seam: the result of the N-th attempt from now (1 is the next) is replaced by `result`.
    void replace_result(std::uint64_t nth, std::int64_t result);

   private:
    struct Request {
        Operation operation;
        std::shared_ptr<File> file;
        std::uint64_t offset;
        char *address;
        std::uint64_t nbytes;
        std::uint64_t unfinished_bytes;
        std::shared_ptr<Ticket> ticket;
        std::uint64_t failed_at;  // lowest byte of the request that did not arrive
        Outcome outcome;
    };

    std::optional<Transfer> take_locked();
    void end_block_locked(Transfer &transfer, bool is_good);

    const DriveSettings settings_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    DriveQueue queue_;
    std::unordered_map<std::uint64_t, Request> requests_;
    std::uint64_t next_request_id_ = 1;
    std::uint32_t num_waiting_threads_ = 0;
    bool is_stopped_ = false;
    DriveCounters counters_;
    std::uint64_t num_attempts_ = 0;
    std::map<std::uint64_t, std::int64_t> replaced_results_;
};

// Moves the blocks of one drive on threads of its own.
class Mover {
   public:
    virtual ~Mover() = default;
    // Runs on: any thread. May block: no. Call after `Drive::start`.
    virtual void wake() = 0;
    // Runs on: the closing thread. May block: yes, until every accepted request is finished.
    virtual void finish() = 0;
};

// Both throw std::system_error when the system refuses. The uring one refuses with ENOSYS where this
// build or this kernel has no io_uring.
std::unique_ptr<Mover> make_thread_mover(std::shared_ptr<Drive> drive);
std::unique_ptr<Mover> make_uring_mover(std::shared_ptr<Drive> drive);

// 0 if io_uring works here, else the errno that refused it.
int probe_uring();
// False where the kernel headers had no io_uring when this was compiled.
bool is_uring_compiled_in();

}  // namespace lohan
