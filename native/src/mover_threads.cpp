// Moves blocks with preadv and pwritev, one thread per block in flight. Works on every kernel and filesystem.
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "lohan/drive.hpp"
#include "lohan/io_thread.hpp"

namespace lohan {

namespace {

std::int64_t attempt(const Transfer &transfer) {
    const int descriptor = transfer.file->descriptor();
    ssize_t result;
    if (transfer.block.operation == Operation::kFlush) {
        result = ::fdatasync(descriptor);
    } else {
        const iovec memory{transfer.address + transfer.position, transfer.attempt_bytes()};
        const auto offset = static_cast<off_t>(transfer.offset + transfer.position);
        result = transfer.block.operation == Operation::kRead ? ::preadv(descriptor, &memory, 1, offset)
                                                              : ::pwritev(descriptor, &memory, 1, offset);
    }
    return result < 0 ? -static_cast<std::int64_t>(errno) : static_cast<std::int64_t>(result);
}

class ThreadMover final : public Mover {
   public:
    explicit ThreadMover(std::shared_ptr<Drive> drive) : drive_(std::move(drive)) {
        while (threads_.size() < drive_->settings().max_requests) {
            try {
                threads_.push_back(start_io_thread([drive = drive_] { move_blocks(*drive); }));
            } catch (const std::system_error &) {
                // With fewer threads than asked it is slower, not wrong; with none it cannot work.
                if (threads_.empty()) throw;
                break;
            }
        }
    }
    ~ThreadMover() override { finish(); }

    void wake() override {}  // `Drive::start` has woken a thread already

    void finish() override {
        drive_->stop();
        for (auto &thread : threads_) thread.join();
        threads_.clear();
    }

   private:
    static void move_blocks(Drive &drive) {
        while (auto transfer = drive.wait_and_take())
            while (drive.report(*transfer, attempt(*transfer))) pause_before_retry(transfer->num_retries);
    }

    std::shared_ptr<Drive> drive_;
    std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Mover> make_thread_mover(std::shared_ptr<Drive> drive) {
    return std::make_unique<ThreadMover>(std::move(drive));
}

}  // namespace lohan
