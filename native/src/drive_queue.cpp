// See drive_queue.hpp for the order of blocks.
#include "lohan/drive_queue.hpp"

#include <algorithm>

namespace lohan {

namespace {
constexpr int index_of(Operation operation) { return static_cast<int>(operation); }
constexpr Operation opposite(Operation direction) {
    return direction == Operation::kRead ? Operation::kWrite : Operation::kRead;
}
}  // namespace

DriveQueue::DriveQueue(const DriveSettings &settings) : settings_(settings) {}

void DriveQueue::push(std::uint64_t request_id, Operation operation, int priority, std::uint64_t nbytes) {
    if (operation == Operation::kFlush) {
        flushes_.push_back(request_id);
        return;
    }
    const int level = std::clamp(priority, 0, kNumPriorities - 1);
    lines_[index_of(operation)][level].push_back({request_id, nbytes, 0});
    if (operation == Operation::kWrite) unfinished_writes_[request_id] = nbytes;
}

int DriveQueue::first_priority(Operation direction) const {
    for (int level = 0; level < kNumPriorities; ++level)
        if (!lines_[index_of(direction)][level].empty()) return level;
    return kNumPriorities;
}

std::optional<Operation> DriveQueue::choose_simplex_direction(int reads, int writes) {
    const int here = direction_ == Operation::kRead ? reads : writes;
    const int there = direction_ == Operation::kRead ? writes : reads;
    const bool is_turn_over = there == here && bytes_in_turn_ >= settings_.fairness_bytes;
    if (there < here || (there != kNumPriorities && is_turn_over)) {
        if (num_in_flight_by_direction_[index_of(direction_)] > 0) return std::nullopt;
        direction_ = opposite(direction_);
        bytes_in_turn_ = 0;
    }
    return direction_;
}

std::optional<Operation> DriveQueue::choose_direction() {
    const int reads = first_priority(Operation::kRead);
    const int writes = first_priority(Operation::kWrite);
    if (reads == kNumPriorities && writes == kNumPriorities) return std::nullopt;
    if (settings_.is_simplex) return choose_simplex_direction(reads, writes);
    if (reads != writes) return reads < writes ? Operation::kRead : Operation::kWrite;
    const auto first_read = lines_[0][reads].front().request_id;
    const auto first_write = lines_[1][writes].front().request_id;
    return first_read < first_write ? Operation::kRead : Operation::kWrite;
}

std::optional<Block> DriveQueue::next() {
    if (num_in_flight_ >= settings_.max_requests) return std::nullopt;
    if (!flushes_.empty()) {
        const auto flush = flushes_.front();
        if (unfinished_writes_.empty() || unfinished_writes_.begin()->first > flush) {
            flushes_.pop_front();
            ++num_in_flight_;
            return Block{flush, Operation::kFlush, 0, 0};
        }
    }
    const auto direction = choose_direction();
    if (!direction) return std::nullopt;
    auto &line = lines_[index_of(*direction)][first_priority(*direction)];
    auto &request = line.front();
    const auto nbytes = std::min(settings_.block_bytes, request.nbytes - request.handed_out);
    if (bytes_in_flight_ > 0 && bytes_in_flight_ + nbytes > settings_.max_bytes) return std::nullopt;
    const Block block{request.request_id, *direction, request.handed_out, nbytes};
    request.handed_out += nbytes;
    if (request.handed_out == request.nbytes) line.pop_front();
    ++num_in_flight_;
    ++num_in_flight_by_direction_[index_of(*direction)];
    bytes_in_flight_ += nbytes;
    bytes_in_turn_ += nbytes;
    return block;
}

void DriveQueue::finished(const Block &block) {
    --num_in_flight_;
    if (block.operation == Operation::kFlush) return;
    --num_in_flight_by_direction_[index_of(block.operation)];
    bytes_in_flight_ -= block.nbytes;
    if (block.operation == Operation::kWrite) write_shrinks(block.request_id, block.nbytes);
}

std::uint64_t DriveQueue::drop(std::uint64_t request_id) {
    for (const auto direction : {Operation::kRead, Operation::kWrite}) {
        for (auto &line : lines_[index_of(direction)]) {
            const auto place = std::find_if(line.begin(), line.end(), [&](const Waiting &waiting) {
                return waiting.request_id == request_id;
            });
            if (place == line.end()) continue;
            const auto dropped = place->nbytes - place->handed_out;
            line.erase(place);
            if (direction == Operation::kWrite) write_shrinks(request_id, dropped);
            return dropped;
        }
    }
    return 0;
}

void DriveQueue::write_shrinks(std::uint64_t request_id, std::uint64_t nbytes) {
    const auto place = unfinished_writes_.find(request_id);
    place->second -= nbytes;
    if (place->second == 0) unfinished_writes_.erase(place);
}

bool DriveQueue::is_idle() const {
    return num_in_flight_ == 0 && flushes_.empty() && first_priority(Operation::kRead) == kNumPriorities &&
           first_priority(Operation::kWrite) == kNumPriorities;
}

}  // namespace lohan
