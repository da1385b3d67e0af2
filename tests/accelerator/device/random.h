// Random numbers: the state (seed, offset) lives on the host and moves when work is queued.
//
// Also what torch asks of a device by way of its hooks.
#pragma once
#include "memory.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

namespace testgpu {

std::mutex random_mutex;
uint64_t random_seed = 67280421310721ull, random_offset = 0;

/// A generator for one operator; the state moves on as far as it may draw.
at::Generator next_generator(int64_t numel) {
  std::lock_guard<std::mutex> lock(random_mutex);
  uint64_t x = random_seed * 0x9E3779B97F4A7C15ull + random_offset + 1;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  random_offset += std::max<int64_t>(4, (numel + 3) / 4 * 4);
  return at::detail::createCPUGenerator(x ^ (x >> 31));
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(DeviceIndex d) const override { current_device = d; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    auto old = current_device;
    current_device = d;
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override {
    return d < 0 ? current_device : exchangeDevice(d);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data, 1); }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    static auto* one = new at::Generator(at::detail::createCPUGenerator(1));
    return *one;
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::detail::createCPUGenerator(1);
  }
};

}  // namespace testgpu
