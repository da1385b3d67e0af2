// Moves blocks with io_uring by raw system calls: one ring and one thread per drive.
//
// The thread that owns the ring is the only one that submits, because the kernel cancels the requests
// of a thread that exits. Others wake it through an eventfd that the ring polls.
// Uses only what the first kernels with io_uring (5.1) offer, and needs no library.
#include <cerrno>
#include <system_error>
#include <utility>

#include "lohan/drive.hpp"

#if !defined(LOHAN_WITHOUT_URING) && defined(__linux__) && __has_include(<linux/io_uring.h>)
#define LOHAN_HAS_URING 1
#else
#define LOHAN_HAS_URING 0
#endif

#if LOHAN_HAS_URING

#include <linux/io_uring.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#include "lohan/io_thread.hpp"
#include "lohan/uring.hpp"

namespace lohan {

namespace {

// user_data of the poll on the eventfd; blocks use the index of their slot.
constexpr std::uint64_t kWakeUp = ~std::uint64_t{0};

class UringMover final : public Mover {
   public:
    explicit UringMover(std::shared_ptr<Drive> drive)
        : drive_(std::move(drive)), ring_(std::make_unique<Ring>(drive_->settings().max_requests + 1)) {
        wake_descriptor_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (wake_descriptor_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
        slots_.resize(drive_->settings().max_requests);
        for (std::uint32_t index = 0; index < slots_.size(); ++index) free_slots_.push_back(index);
        try {
            thread_ = start_io_thread([this] { run(); });
        } catch (...) {
            ::close(wake_descriptor_);
            throw;
        }
    }

    ~UringMover() override { finish(); }

    void wake() override {
        // A late caller must not write to a descriptor that is closed and may be another file by now.
        const std::lock_guard<std::mutex> lock(wake_mutex_);
        if (wake_descriptor_ < 0) return;
        const std::uint64_t one = 1;
        // Can only fail when the counter is full, and then the thread is about to wake anyway.
        [[maybe_unused]] const auto written = ::write(wake_descriptor_, &one, sizeof one);
    }

    void finish() override {
        drive_->stop();
        if (!thread_.joinable()) return;
        wake();
        thread_.join();
        ring_.reset();
        const std::lock_guard<std::mutex> lock(wake_mutex_);
        ::close(wake_descriptor_);
        wake_descriptor_ = -1;
    }

   private:
    struct Slot {
        Transfer transfer;
        iovec memory{};
    };

    // Everything below runs on the ring's thread only.

    void run() {
        bool is_poll_armed = false;
        while (true) {
            if (!is_poll_armed) is_poll_armed = arm_poll();
            while (!free_slots_.empty()) {
                auto transfer = drive_->take();
                if (!transfer) break;
                const auto index = free_slots_.back();
                free_slots_.pop_back();
                slots_[index].transfer = std::move(*transfer);
                prepare(index);
            }
            if (free_slots_.size() == slots_.size() && drive_->is_stopped_and_idle()) return;
            submit_and_wait();
            while (const auto completion = ring_->pop()) {
                if (completion->user_data == kWakeUp) {
                    is_poll_armed = false;
                    std::uint64_t count;
                    [[maybe_unused]] const auto got = ::read(wake_descriptor_, &count, sizeof count);
                } else {
                    settle(static_cast<std::uint32_t>(completion->user_data), completion->result);
                }
            }
        }
    }

    bool arm_poll() {
        io_uring_sqe *entry = ring_->next_entry();
        entry->opcode = IORING_OP_POLL_ADD;
        entry->fd = wake_descriptor_;
        entry->poll_events = POLLIN;
        entry->user_data = kWakeUp;
        return true;
    }

    void prepare(std::uint32_t index) {
        auto &slot = slots_[index];
        const auto &transfer = slot.transfer;
        io_uring_sqe *entry = ring_->next_entry();
        entry->fd = transfer.file->descriptor();
        entry->user_data = index;
        if (transfer.block.operation == Operation::kFlush) {
            entry->opcode = IORING_OP_FSYNC;
            entry->fsync_flags = IORING_FSYNC_DATASYNC;
            return;
        }
        slot.memory = {transfer.address + transfer.position, transfer.attempt_bytes()};
        entry->opcode = transfer.block.operation == Operation::kRead ? IORING_OP_READV : IORING_OP_WRITEV;
        entry->off = transfer.offset + transfer.position;
        entry->addr = reinterpret_cast<std::uintptr_t>(&slot.memory);
        entry->len = 1;
    }

    void settle(std::uint32_t index, std::int64_t result) {
        auto &transfer = slots_[index].transfer;
        if (drive_->report(transfer, result)) {
            pause_before_retry(transfer.num_retries);
            prepare(index);
        } else {
            free_slots_.push_back(index);
        }
    }

    void submit_and_wait() {
        const int error = ring_->enter();
        if (error == 0 || error == EINTR) return;
        if (error == EAGAIN || error == EBUSY) {
            // The kernel is out of requests or wants completions taken first: the loop does both.
            pause_before_retry(100);
            return;
        }
        // The ring refuses what it was given: those blocks fail with its errno. Nothing is lost, and
        // blocks the kernel already has still complete, because their memory is still theirs.
        for (const auto user_data : ring_->take_back_unsubmitted()) {
            if (user_data == kWakeUp) {
                arm_poll();
                continue;
            }
            settle(static_cast<std::uint32_t>(user_data), -error);
        }
        pause_before_retry(100);
    }

    std::shared_ptr<Drive> drive_;
    std::unique_ptr<Ring> ring_;
    std::mutex wake_mutex_;
    int wake_descriptor_ = -1;
    std::vector<Slot> slots_;
    std::vector<std::uint32_t> free_slots_;
    std::thread thread_;
};

}  // namespace

std::unique_ptr<Mover> make_uring_mover(std::shared_ptr<Drive> drive) {
    return std::make_unique<UringMover>(std::move(drive));
}

int probe_uring() {
    try {
        Ring ring(2);
        return 0;
    } catch (const std::system_error &error) {
        return error.code().value();
    }
}

bool is_uring_compiled_in() { return true; }

}  // namespace lohan

#else

namespace lohan {

std::unique_ptr<Mover> make_uring_mover(std::shared_ptr<Drive>) {
    throw std::system_error(ENOSYS, std::generic_category(), "io_uring");
}

int probe_uring() { return ENOSYS; }

bool is_uring_compiled_in() { return false; }

}  // namespace lohan

#endif
