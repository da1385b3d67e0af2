// The native engine: drives, their movers, and the door through which requests come in.
// Errors of requests travel in tickets; what is refused at the door is thrown.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "lohan/drive.hpp"

namespace lohan {

enum class EngineKind { kUring, kThreads };

// Thrown at the door when the engine is closed, or in a child process after a fork (which has no I/O
// threads): the caller's mistake, not the drive's.
class EngineUnusable : public std::exception {
   public:
    explicit EngineUnusable(std::string reason) : reason_(std::move(reason)) {}
    const char *what() const noexcept override { return reason_.c_str(); }

   private:
    std::string reason_;
};

class IoEngine {
   public:
    explicit IoEngine(EngineKind kind) : kind_(kind), process_id_(::getpid()) {}
    ~IoEngine();
    IoEngine(const IoEngine &) = delete;
    IoEngine &operator=(const IoEngine &) = delete;

    // Returns the drive's number. Throws std::system_error if threads or a ring cannot be had.
    int add_drive(const DriveSettings &settings);
    // Runs on: any thread. May block: no. Owns until: the ticket is done, [address, address + nbytes)
    // belongs to the engine.
    std::shared_ptr<Ticket> start(Operation operation, const std::shared_ptr<File> &file, std::uint64_t offset,
                                  std::uint64_t address, std::uint64_t nbytes, int priority);
    // Runs on: any thread. May block: yes, until every accepted request is finished. Twice is fine.
    void close();

    Drive &drive(int number) const;

   private:
    struct Served {
        std::shared_ptr<Drive> drive;
        std::unique_ptr<Mover> mover;
    };

    void refuse_after_fork() const;

    const EngineKind kind_;
    const pid_t process_id_;
    mutable std::mutex mutex_;
    std::mutex closing_mutex_;
    bool is_closed_ = false;
    std::vector<std::unique_ptr<Served>> drives_;
};

// Makes [0, nbytes) of the file real on the drive, so that later writes cannot run out of space.
// Uses fallocate; where the filesystem has none, writes zeros from `from` on. Returns 0 or an errno.
int reserve_space(int descriptor, std::uint64_t from, std::uint64_t nbytes);

}  // namespace lohan
