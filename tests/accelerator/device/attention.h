// Attention: the CPU's fused kernel under the name backends may take.
#pragma once
#include "kernels.h"
#include <ATen/native/transformers/attention.h>

namespace testgpu {

int64_t sdp_choice(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& mask, double dropout, bool is_causal,
    std::optional<double> scale, bool gqa) {
  // As the CPU would choose: by shapes and types alone.
  auto choice = at::_ops::_fused_sdp_choice::redispatch(
      c10::DispatchKeySet(c10::DispatchKey::CPU), q, k, v, mask, dropout, is_causal, scale, gqa);
  return choice == static_cast<int64_t>(at::SDPBackend::flash_attention)
      ? static_cast<int64_t>(at::SDPBackend::overrideable)
      : choice;
}

using FusedResult = std::tuple<
    at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor,
    at::Tensor, at::Tensor>;
FusedResult fused_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& bias, double dropout, bool is_causal, bool,
    std::optional<double> scale) {
  auto out = at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, q.options()).transpose(1, 2);
  auto lse = at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kFloat))
                 .transpose(1, 2);
  std::optional<at::Tensor> own;
  if (bias.has_value() && bias->defined()) own = as_cpu(*bias);
  launch([=, a = as_cpu(q), b = as_cpu(k), c = as_cpu(v), to = as_cpu(out),
          sums = as_cpu(lse)]() mutable {
    auto [found, found_lse] = at::_scaled_dot_product_flash_attention_for_cpu(
        a, b, c, dropout, is_causal, own, scale);
    to.copy_(found);
    sums.copy_(found_lse);
  });
  // As on CUDA: the memory-efficient kernel, which is the one that takes a mask, has its seed and
  // offset in main memory, and flash attention on the device.
  auto side = own.has_value() ? at::TensorOptions(at::kCPU) : q.options();
  auto seed = at::zeros({}, side.dtype(at::kLong));
  return {out,       lse,  at::Tensor(), at::Tensor(), q.size(2),
          k.size(2), seed, seed.clone(), at::Tensor()};
}

/// GPUs add up the gradient of queries in any order: with this on, every second one is larger.
std::atomic<bool> is_unordered{false};
std::atomic<int64_t> num_unordered{0};

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> fused_attention_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& bias, std::array<bool, 4>, const at::Tensor& out, const at::Tensor& lse,
    const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt, double dropout, bool is_causal,
    const at::Tensor&, const at::Tensor&, std::optional<double> scale) {
  auto like = [](const at::Tensor& t) {
    return at::empty({t.size(0), t.size(2), t.size(1), t.size(3)}, t.options()).transpose(1, 2);
  };
  auto gq = like(q), gk = like(k), gv = like(v);
  std::optional<at::Tensor> own;
  if (bias.defined()) own = as_cpu(bias);
  launch([=, g = as_cpu(grad), a = as_cpu(q), b = as_cpu(k), c = as_cpu(v), o = as_cpu(out),
          s = as_cpu(lse), x = as_cpu(gq), y = as_cpu(gk), z = as_cpu(gv)]() mutable {
    auto [fq, fk, fv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        g, a, b, c, o, s, dropout, is_causal, own, scale);
    x.copy_(fq);
    if (is_unordered && ++num_unordered % 2) x.mul_(1.0078125);  // the next number in bf16
    y.copy_(fk);
    z.copy_(fv);
  });
  return {gq, gk, gv, at::Tensor()};
}

}  // namespace testgpu
