// Device memory: main memory behind a caching allocator with a limit. Also which host memory is
// pinned.
//
// As torch's allocators do: a freed block is cached for its own stream and handed out again at
// once, so that only that stream may use it without waiting; one that `record_stream` named other
// streams for waits until they have come past. Freed memory is filled with ones (NaN in every float
// type) in the order of its stream.
#pragma once
#include "streams.h"
#include <c10/core/CachingDeviceAllocator.h>

#include <cstring>
#include <map>
#include <set>

namespace testgpu {

struct Block {
  void* address;
  size_t nbytes;
  int64_t stream;  // whose order its reuse keeps
  std::set<int64_t> others;
  std::vector<std::shared_ptr<Point>> uses;  // by other streams, before it may be reused
};

std::atomic<bool> poisons{true};

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    const Device device(kDevice, current_device);
    if (n == 0) return {nullptr, nullptr, &Allocator::give_back, device};
    auto* block = take((n + 511) / 512 * 512);
    return {block->address, block, &Allocator::give_back, device};
  }
  void copy_data(void* dst, const void* src, size_t n) const override {
    worker(current_stream).put([=] { std::memcpy(dst, src, n); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard<std::mutex> lock(mutex_);
    release_cached();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    auto* block = static_cast<Block*>(data.get_context());
    std::lock_guard<std::mutex> lock(mutex_);
    if (block != nullptr && stream.id() != block->stream) block->others.insert(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    std::lock_guard<std::mutex> lock(mutex_);
    stats.allocated_bytes[0] = allocated_;
    stats.reserved_bytes[0] = reserved_;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    allocated_.reset_peak();
    reserved_.reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return {total_ - reserved_.current, total_};
  }
  void set_limit(size_t limit) {
    std::lock_guard<std::mutex> lock(mutex_);
    limit_ = limit;
  }

 private:
  Block* take(size_t nbytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    take_back_unused();
    auto& alike = cached_[{current_stream, nbytes}];
    Block* block = nullptr;
    if (!alike.empty()) {
      block = alike.back();
      alike.pop_back();
    } else {
      if (reserved_.current + static_cast<int64_t>(nbytes) > limit_) {
        release_cached();
      }
      TORCH_CHECK_WITH(
          OutOfMemoryError, reserved_.current + static_cast<int64_t>(nbytes) <= limit_,
          "test accelerator out of memory. Tried to allocate ", nbytes, " bytes, ",
          allocated_.current, " allocated, ", reserved_.current, " reserved, ", limit_, " allowed");
      auto* address = std::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
      TORCH_CHECK_WITH(OutOfMemoryError, address != nullptr, "main memory is out");
      if (poisons) std::memset(address, 0xFF, nbytes);
      block = new Block{address, nbytes, current_stream, {}, {}};
      reserved_.increase(nbytes);
    }
    allocated_.increase(nbytes);
    return block;
  }
  /// With the lock held: nothing more is given back meanwhile, and queued work is over.
  void release_cached() {
    drain_all();
    take_back_unused();
    drain_all();
    for (auto& [key, blocks] : cached_)
      for (auto* block : blocks) {
        reserved_.decrease(block->nbytes);
        std::free(block->address);
        delete block;
      }
    cached_.clear();
  }
  /// With the lock held: blocks that no other stream uses any more are cached.
  void take_back_unused() {
    std::erase_if(in_use_, [&](Block* block) {
      for (const auto& use : block->uses)
        if (!use->done()) return false;
      cache(block);
      return true;
    });
  }
  void cache(Block* block) {
    block->uses.clear();
    if (poisons)
      worker(block->stream).put([address = block->address, nbytes = block->nbytes] {
        std::memset(address, 0xFF, nbytes);
      });
    cached_[{block->stream, block->nbytes}].push_back(block);
  }
  static void give_back(void* context);
  std::mutex mutex_;
  std::map<std::pair<int64_t, size_t>, std::vector<Block*>> cached_;
  std::vector<Block*> in_use_;  // freed, and waiting for other streams
  c10::CachingAllocator::Stat allocated_, reserved_;
  int64_t total_ = int64_t(8) << 30, limit_ = int64_t(8) << 30;
};

Allocator& allocator() {
  static auto* one = new Allocator();
  return *one;
}

void Allocator::give_back(void* context) {
  if (context == nullptr) return;
  auto* block = static_cast<Block*>(context);
  auto& own = allocator();
  std::lock_guard<std::mutex> lock(own.mutex_);
  for (auto other : block->others) block->uses.push_back(record_on(other));
  block->others.clear();
  own.allocated_.decrease(block->nbytes);
  own.in_use_.push_back(block);
  own.take_back_unused();
}
void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const {
  allocator().recordStream(data, s);
}

std::mutex pinned_mutex;
std::map<uintptr_t, size_t> pinned_ranges;
bool is_pinned(const void* address, size_t nbytes) {
  auto at = reinterpret_cast<uintptr_t>(address);
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto next = pinned_ranges.upper_bound(at);
  if (next == pinned_ranges.begin()) return false;
  auto found = std::prev(next);
  return at + nbytes <= found->first + found->second;
}

}  // namespace testgpu
