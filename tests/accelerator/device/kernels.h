// Kernels that a backend must bring: making tensors, views, copies, dropout.
#pragma once
#include "operators.h"

namespace testgpu {

at::Tensor empty_memory_format(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided,
              "the test accelerator has strided tensors only");
  return at::detail::empty_generic(
      size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  return empty_here(size, stride, c10::dtype_or_default(dtype));
}
const at::Tensor& resize_(
    const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  drain_current();
  at::native::resize_(self, size, format);
  drain_current();
  return self;
}

/// Queues a copy between the sides, at the rate its stream was given.
void launch_copy(at::Tensor to, at::Tensor from) {
  const double rate = worker(current_stream).bytes_per_second;
  launch([to, from, rate]() mutable {
    const auto began = std::chrono::steady_clock::now();
    to.copy_(from);
    if (rate > 0)
      std::this_thread::sleep_until(
          began + std::chrono::nanoseconds(static_cast<int64_t>(1e9 * to.nbytes() / rate)));
  });
}

at::Tensor copy_from(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  if (is_here(src) && is_here(dst)) {
    launch([to = as_cpu(dst), from = as_cpu(src)]() mutable { to.copy_(from); });
    return dst;
  }
  const bool is_upward = is_here(dst);
  const auto& host = is_upward ? src : dst;
  const bool is_direct = host.is_non_overlapping_and_dense() &&
      is_pinned(host.const_data_ptr(), host.nbytes());
  if (is_upward) {
    // Pageable memory is staged: it has been read when this returns. Pinned memory is read later.
    launch_copy(as_cpu(dst), is_direct ? as_cpu(src) : src.clone());
    if (!non_blocking) drain_current();
  } else if (is_direct && non_blocking) {
    launch_copy(as_cpu(dst), as_cpu(src));
  } else {
    drain_current();
    auto to = dst;
    to.copy_(as_cpu(src));
  }
  return dst;
}
at::Tensor copy_from_and_resize(const at::Tensor& src, const at::Tensor& dst) {
  dst.resize_(src.sizes());
  return copy_from(src, dst, false);
}
at::Scalar local_scalar_dense(const at::Tensor& self) {
  drain_current();
  return as_cpu(self).item();
}
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  return self.layout() == at::kStrided && from.layout() == at::kStrided && !self.is_meta() &&
      !from.is_meta();
}
void record_stream(at::Tensor& self, c10::Stream s) {
  allocator().recordStream(self.storage().data_ptr(), s);
}

/// GPUs count integers (experts' tokens, in transformers), the CPU only floating point numbers.
at::Tensor histc(
    const at::Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  auto counts = at::empty({bins}, self.options());
  launch([from = as_cpu(self), to = as_cpu(counts), bins, min, max]() mutable {
    const bool is_whole = at::isIntegralType(from.scalar_type(), false);
    to.copy_(at::histc(is_whole ? from.to(at::kDouble) : from, bins, min, max));
  });
  return counts;
}

std::tuple<at::Tensor, at::Tensor> native_dropout(
    const at::Tensor& input, double p, std::optional<bool> train) {
  auto mask = at::empty(input.sizes(), input.options().dtype(at::kBool));
  if (!train.value_or(true) || p == 0) return {input.clone(), mask.fill_(true)};
  auto output = at::empty_like(input);
  launch([in = as_cpu(input), out = as_cpu(output), kept = as_cpu(mask), p,
          generator = next_generator(input.numel())]() mutable {
    kept.bernoulli_(1 - p, generator);
    out.copy_(in.mul(kept).mul_(p == 1 ? 0. : 1. / (1 - p)));
  });
  return {output, mask};
}

}  // namespace testgpu
