// Putting work into a stream, and tensors as that work sees them: bare addresses.
#pragma once
#include "random.h"
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>

namespace testgpu {

std::atomic<bool> is_asynchronous{true};

/// Queues work on the current stream.
void launch(std::function<void()> job) {
  raise_error();
  const int threads = at::get_num_threads();
  auto& queue = worker(current_stream);
  queue.put([job = std::move(job), threads] {
    if (at::get_num_threads() != threads) at::set_num_threads(threads);
    job();
  }, true);
  if (!is_asynchronous) queue.drain();
}

/// Waits for the current stream.
void drain_current() {
  worker(current_stream).drain();
  raise_error();
}

/// The same memory as a CPU tensor. Keeps nothing alive.
at::Tensor as_cpu(const at::Tensor& t) {
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  at::Tensor own = t.numel() == 0 ? at::empty_strided(t.sizes(), t.strides(), options)
                                  : at::from_blob(const_cast<void*>(t.const_data_ptr()), t.sizes(),
                                                  t.strides(), options);
  if (t.is_conj()) own._set_conj(true);
  if (t.is_neg()) own._set_neg(true);
  return own;
}

bool is_here(const at::Tensor& t) { return t.defined() && t.device().type() == kDevice; }

at::Tensor empty_here(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype) {
  return at::detail::empty_strided_generic(
      size, stride, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

/// A copy of a CPU tensor. The stream must be empty.
at::Tensor to_device(const at::Tensor& cpu) {
  if (!cpu.defined()) return cpu;
  auto own = empty_here(cpu.sizes(), cpu.strides(), cpu.scalar_type());
  if (cpu.numel()) as_cpu(own).copy_(cpu);
  return own;
}

}  // namespace testgpu
