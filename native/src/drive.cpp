// See drive.hpp. The mutex guards every field; nothing slow happens under it.
#include "lohan/drive.hpp"

#include <algorithm>
#include <utility>

namespace lohan {

Drive::Drive(const DriveSettings &settings) : settings_(settings), queue_(settings) {}

std::shared_ptr<Ticket> Drive::start(Operation operation, std::shared_ptr<File> file, std::uint64_t offset,
                                     char *address, std::uint64_t nbytes, int priority) {
    auto ticket = std::make_shared<Ticket>();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_stopped_) return nullptr;
    const auto id = next_request_id_++;
    requests_.emplace(id, Request{operation, std::move(file), offset, address, nbytes, nbytes, ticket, nbytes, {}});
    queue_.push(id, operation, priority, nbytes);
    ++counters_.num_started;
    changed_.notify_one();
    return ticket;
}

std::optional<Transfer> Drive::take_locked() {
    const auto block = queue_.next();
    if (!block) return std::nullopt;
    const auto &request = requests_.at(block->request_id);
    ++counters_.num_blocks;
    counters_.max_in_flight = std::max(counters_.max_in_flight, queue_.num_in_flight());
    Transfer transfer;
    transfer.block = *block;
    transfer.file = request.file;
    transfer.offset = request.offset + block->start;
    transfer.address = request.address + block->start;
    return transfer;
}

std::optional<Transfer> Drive::take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return take_locked();
}

std::optional<Transfer> Drive::wait_and_take() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        if (auto transfer = take_locked()) {
            // One push may hold several blocks, and its single notify woke only this thread.
            if (num_waiting_threads_ > 0) changed_.notify_one();
            return transfer;
        }
        if (is_stopped_ && queue_.is_idle()) return std::nullopt;
        ++num_waiting_threads_;
        changed_.wait(lock);
        --num_waiting_threads_;
    }
}

bool Drive::report(Transfer &transfer, std::int64_t result) {
    // The descriptor must be free to close by the time anybody sees the ticket done.
    std::shared_ptr<File> file = std::move(transfer.file);
    const std::lock_guard<std::mutex> lock(mutex_);
    ++num_attempts_;
    if (!replaced_results_.empty()) {
        const auto replaced = replaced_results_.find(num_attempts_);
        if (replaced != replaced_results_.end()) {
            result = replaced->second;
            replaced_results_.erase(replaced);
        }
    }
    switch (transfer.judge(result)) {
        case Transfer::Verdict::kContinue:
            ++counters_.num_continued;
            transfer.file = std::move(file);
            return true;
        case Transfer::Verdict::kRetry:
            ++counters_.num_retried;
            transfer.file = std::move(file);
            return true;
        case Transfer::Verdict::kDone:
            file.reset();
            end_block_locked(transfer, true);
            return false;
        case Transfer::Verdict::kFailed:
            file.reset();
            end_block_locked(transfer, false);
            return false;
    }
    return false;
}

void Drive::end_block_locked(Transfer &transfer, bool is_good) {
    const auto &block = transfer.block;
    queue_.finished(block);
    const auto place = requests_.find(block.request_id);
    auto &request = place->second;
    if (block.operation == Operation::kRead) counters_.read_bytes += transfer.got;
    if (block.operation == Operation::kWrite) counters_.written_bytes += transfer.got;
    request.unfinished_bytes -= block.nbytes;
    if (!is_good) {
        // Blocks not started yet lie behind this one, so the lowest failure is known once those in
        // flight are back: the error a user sees does not depend on the order of completions.
        request.unfinished_bytes -= queue_.drop(block.request_id);
        const auto failed_at = block.start + transfer.got;
        if (request.outcome.is_good() || failed_at < request.failed_at) {
            request.failed_at = failed_at;
            request.outcome.error_number = transfer.error_number;
            request.outcome.is_short = transfer.is_short;
        }
    }
    if (request.unfinished_bytes == 0) {
        auto ticket = std::move(request.ticket);
        auto outcome = request.outcome;
        outcome.got_bytes = outcome.is_good() ? request.nbytes : request.failed_at;
        ++counters_.num_finished;
        if (!outcome.is_good()) ++counters_.num_failed;
        requests_.erase(place);
        ticket->complete(outcome);
    }
    // Room in the queue is taken by the thread that made it. At the end all must wake to leave.
    if (is_stopped_) changed_.notify_all();
}

void Drive::stop() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_stopped_ = true;
    changed_.notify_all();
}

bool Drive::is_stopped_and_idle() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return is_stopped_ && queue_.is_idle();
}

DriveCounters Drive::counters() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return counters_;
}

void Drive::replace_result(std::uint64_t nth, std::int64_t result) {
    const std::lock_guard<std::mutex> lock(mutex_);
    replaced_results_[num_attempts_ + nth] = result;
}

}  // namespace lohan
