// See io_engine.hpp.
#include "lohan/io_engine.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <utility>

#include "lohan/aligned_memory.hpp"

namespace lohan {

IoEngine::~IoEngine() {
    if (::getpid() == process_id_) {
        close();
        return;
    }
    // In a forked child the threads do not exist: joining them would never end. Leave all as it is.
    for (auto &served : drives_) static_cast<void>(served.release());
}

void IoEngine::refuse_after_fork() const {
    if (::getpid() != process_id_) throw EngineUnusable("it belongs to another process (this one was forked from it)");
}

int IoEngine::add_drive(const DriveSettings &settings) {
    refuse_after_fork();
    auto served = std::make_unique<Served>();
    served->drive = std::make_shared<Drive>(settings);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_closed_) throw EngineUnusable("it is closed");
    served->mover = kind_ == EngineKind::kUring ? make_uring_mover(served->drive) : make_thread_mover(served->drive);
    drives_.push_back(std::move(served));
    return static_cast<int>(drives_.size()) - 1;
}

std::shared_ptr<Ticket> IoEngine::start(Operation operation, const std::shared_ptr<File> &file, std::uint64_t offset,
                                        std::uint64_t address, std::uint64_t nbytes, int priority) {
    refuse_after_fork();
    Served *served = nullptr;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (is_closed_) throw EngineUnusable("it is closed");
        served = drives_.at(static_cast<std::size_t>(file->drive())).get();
    }
    auto ticket = served->drive->start(operation, file, offset,
                                       reinterpret_cast<char *>(static_cast<std::uintptr_t>(address)), nbytes, priority);
    if (ticket == nullptr) throw EngineUnusable("it is closed");
    served->mover->wake();
    return ticket;
}

void IoEngine::close() {
    refuse_after_fork();
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        is_closed_ = true;
    }
    // Drives stay in place (their counters can still be read); only their threads end.
    const std::lock_guard<std::mutex> lock(closing_mutex_);
    for (auto &served : drives_) served->drive->stop();
    for (auto &served : drives_) served->mover->finish();
}

Drive &IoEngine::drive(int number) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return *drives_.at(static_cast<std::size_t>(number))->drive;
}

int reserve_space(int descriptor, std::uint64_t from, std::uint64_t nbytes) {
    while (true) {
        if (::fallocate(descriptor, 0, static_cast<off_t>(from), static_cast<off_t>(nbytes - from)) == 0) return 0;
        if (errno == EINTR) continue;
        if (errno != EOPNOTSUPP && errno != ENOSYS) return errno;
        break;
    }
    const AlignedMemory zeros(1u << 20, /*should_populate=*/false);
    auto position = from;
    while (position < nbytes) {
        const auto chunk = std::min<std::uint64_t>(zeros.nbytes(), nbytes - position);
        const auto written = ::pwrite(descriptor, zeros.address(), chunk, static_cast<off_t>(position));
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return errno;
        if (written == 0) return ENOSPC;
        position += static_cast<std::uint64_t>(written);
    }
    return 0;
}

}  // namespace lohan
