// Which block a drive transfers next: priorities, bounded depth, few changes of direction.
// Pure logic: no I/O, no clock, no lock. The drive that owns a queue calls it under its own mutex,
// and tests call it with no drive at all.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>

namespace lohan {

enum class Operation : std::uint8_t { kRead = 0, kWrite = 1, kFlush = 2 };

// 0 goes first. The meaning of each level is named in lohan/ssd/engine.py.
constexpr int kNumPriorities = 4;

struct DriveSettings {
    // Blocks handed to the kernel and not finished yet.
    std::uint32_t max_requests = 8;
    // Their bytes together. One block always passes, however large.
    std::uint64_t max_bytes = 32u << 20;
    // Larger requests are cut into blocks of this size.
    std::uint64_t block_bytes = 4u << 20;
    // A simplex drive slows down when reads and writes mix: it never has both in flight.
    bool is_simplex = false;
    // On a simplex drive: bytes of one direction after which the other gets its turn (same priority).
    std::uint64_t fairness_bytes = 256u << 20;
};

// A piece of a request: `start` counts from the beginning of the request.
struct Block {
    std::uint64_t request_id = 0;
    Operation operation = Operation::kRead;
    std::uint64_t start = 0;
    std::uint64_t nbytes = 0;
};

// Note "order of blocks".
// - A higher priority always goes first; inside one priority requests go in the order they came.
// - On a simplex drive the current direction goes on until it has nothing to do, or the other has
//   something of higher priority, or `fairness_bytes` went by and the other has something of the
//   same priority. Blocks in flight finish before the direction changes, so the two never mix.
// - A flush goes out once every write pushed before it has finished, so that waiting for the flush
//   alone is enough to know that those writes are on the drive.
class DriveQueue {
   public:
    explicit DriveQueue(const DriveSettings &settings);

    // `request_id` must grow from call to call. A flush has no bytes; all others have some.
    void push(std::uint64_t request_id, Operation operation, int priority, std::uint64_t nbytes);
    // The block to start now, or nothing if there is none or the drive is as busy as it may be.
    std::optional<Block> next();
    // A block that `next` handed out has ended, well or badly.
    void finished(const Block &block);
    // Forgets what `next` has not handed out of this request; returns how many bytes that was.
    std::uint64_t drop(std::uint64_t request_id);

    std::uint32_t num_in_flight() const { return num_in_flight_; }
    std::uint64_t bytes_in_flight() const { return bytes_in_flight_; }
    // Nothing waits and nothing is in flight.
    bool is_idle() const;

   private:
    struct Waiting {
        std::uint64_t request_id;
        std::uint64_t nbytes;
        std::uint64_t handed_out;
    };

    int first_priority(Operation direction) const;
    std::optional<Operation> choose_direction();
    std::optional<Operation> choose_simplex_direction(int reads, int writes);
    void write_shrinks(std::uint64_t request_id, std::uint64_t nbytes);

    DriveSettings settings_;
    std::deque<Waiting> lines_[2][kNumPriorities];
    std::deque<std::uint64_t> flushes_;
    // Bytes left of each write: what a flush pushed later has to wait for.
    std::map<std::uint64_t, std::uint64_t> unfinished_writes_;
    std::uint32_t num_in_flight_ = 0;
    std::uint32_t num_in_flight_by_direction_[2] = {0, 0};
    std::uint64_t bytes_in_flight_ = 0;
    Operation direction_ = Operation::kRead;
    std::uint64_t bytes_in_turn_ = 0;
};

}  // namespace lohan
