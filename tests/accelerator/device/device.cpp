// A test accelerator for torch: memory is main memory, streams are threads, kernels are the CPU's.
//
// Everything is asynchronous as on a GPU: an operator allocates its results, is queued on the
// current stream and returns; a stream's thread runs the queue in order. Kernels hold bare
// addresses and nothing alive, so whatever is freed, reused or copied too early is really read too
// early.
//
// This file registers it with torch, and has the calls by which tests steer it. The others hold one
// idea each, from streams.h upward; all are one translation unit.
#include "attention.h"

#include <ATen/autocast_mode.h>
#include <ATen/native/DispatchStub.h>

namespace testgpu {
namespace {

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", [](at::Tensor& t, at::Storage s) -> at::Tensor& {
    return at::native::set_(t, s);
  });
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
  m.impl("record_stream", record_stream);
  m.impl("histc", histc);
  m.impl("native_dropout", native_dropout);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&any_operator>());
  m.impl("convolution_backward_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&any_operator>());
  m.impl("_scaled_dot_product_fused_attention_overrideable", fused_attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", fused_attention_backward);
}
// A copy resolves what is conjugated or negated itself. torch would have it resolved by a clone
// first, which is a copy: without an end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>());
}

/// Operators of which the CPU has a kernel and other devices a composition take the CPU's here, as
/// a GPU takes its own. Returns how many there are.
int64_t take_cpu_kernels() {
  static auto* library = new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  int64_t count = 0;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findOp(name);
    if (!op.has_value() || !op->hasSchema()) continue;
    auto has = [&](c10::DispatchKey key) { return op->hasKernelForDispatchKey(key); };
    const bool is_composed = has(c10::DispatchKey::CompositeExplicitAutograd) ||
        has(c10::DispatchKey::CompositeImplicitAutograd);
    if (!has(c10::DispatchKey::CPU) || !is_composed || has(c10::DispatchKey::PrivateUse1)) continue;
    bool is_view = false;
    for (const auto& result : op->schema().returns())
      is_view |= result.alias_info() != nullptr && !result.alias_info()->isWrite();
    if (is_view) continue;
    const auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&any_operator>());
    ++count;
  }
  return count;
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at;
  using at::autocast::CastPolicy;
#define _LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define _FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(_LOWER)
  AT_FORALL_FP32(_FP32)
}

void host_register(int64_t address, int64_t nbytes) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned_ranges[address] = nbytes;
}
void host_unregister(int64_t address) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  TORCH_CHECK(pinned_ranges.erase(address), "nothing is registered there");
}
int64_t pinned_bytes() {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  int64_t sum = 0;
  for (const auto& [address, nbytes] : pinned_ranges) sum += static_cast<int64_t>(nbytes);
  return sum;
}
at::Tensor rng_state() {
  std::lock_guard<std::mutex> lock(random_mutex);
  auto state = at::detail::empty_cpu({16}, at::TensorOptions().dtype(at::kByte));
  std::memcpy(state.mutable_data_ptr(), &random_seed, 8);
  std::memcpy(static_cast<char*>(state.mutable_data_ptr()) + 8, &random_offset, 8);
  return at::Tensor(state);
}
void set_rng_state(const at::Tensor& state) {
  TORCH_CHECK(state.is_cpu() && state.nbytes() == 16, "not a state of this generator");
  std::lock_guard<std::mutex> lock(random_mutex);
  std::memcpy(&random_seed, state.const_data_ptr(), 8);
  std::memcpy(&random_offset, static_cast<const char*>(state.const_data_ptr()) + 8, 8);
}
std::vector<std::string> operators_waited_for() {
  std::vector<std::string> found;
  std::lock_guard<std::mutex> lock(waited_mutex);
  for (const auto& [name, count] : waited_for) found.push_back(name + " " + std::to_string(count));
  return found;
}

TORCH_LIBRARY(testgpu, m) {
  m.def("host_register(int address, int nbytes) -> ()", host_register);
  m.def("host_unregister(int address) -> ()", host_unregister);
  m.def("pinned_bytes() -> int", pinned_bytes);
  m.def("rng_state() -> Tensor", rng_state);
  m.def("set_rng_state(Tensor state) -> ()", set_rng_state);
  m.def("seed(int seed) -> ()", [](int64_t seed) {
    std::lock_guard<std::mutex> lock(random_mutex);
    random_seed = seed;
    random_offset = 0;
  });
  m.def("set_delay(int stream, int microseconds) -> ()",
        [](int64_t stream, int64_t us) { worker(stream).delay_us = us; });
  m.def("set_rate(int stream, float bytes_per_second) -> ()",
        [](int64_t stream, double rate) { worker(stream).bytes_per_second = rate; });
  m.def("pace(int stream, int nanoseconds) -> ()",
        [](int64_t stream, int64_t ns) { worker(stream).pace(ns); });
  m.def("take_gaps(int stream) -> float[]",
        [](int64_t stream) { return worker(stream).take_gaps(); });
  m.def("set_limit(int nbytes) -> ()", [](int64_t n) { allocator().set_limit(n); });
  m.def("set_asynchronous(bool is_on) -> ()", [](bool on) { is_asynchronous = on; });
  m.def("set_unordered(bool is_on) -> ()", [](bool on) { is_unordered = on; });
  m.def("set_poison(bool is_on) -> ()", [](bool on) { poisons = on; });
  m.def("hold(int stream) -> ()", [](int64_t stream) {
    auto gate = std::make_shared<Point>();
    worker(stream).gate = gate;
    worker(stream).put([gate] { gate->wait(); });
  });
  m.def("let_go(int stream) -> ()", [](int64_t stream) {
    if (auto gate = std::exchange(worker(stream).gate, nullptr)) gate->finish();
  });
  m.def("num_jobs(int stream) -> int",
        [](int64_t stream) -> int64_t { return worker(stream).num_jobs.load(); });
  m.def("busy_us(int stream) -> int",
        [](int64_t stream) -> int64_t { return worker(stream).busy_us.load(); });
  m.def("operators_waited_for() -> str[]", operators_waited_for);
  m.def("take_cpu_kernels() -> int", take_cpu_kernels);
  m.def("fail(str what) -> ()", [](std::string what) {
    launch([what] { TORCH_CHECK(false, what); });
  });
  m.def("clear_error() -> ()", [] {
    std::lock_guard<std::mutex> lock(error_mutex);
    first_error.clear();
  });
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
struct Start {
  Start() {
    c10::SetAllocator(kDevice, &allocator());
    at::RegisterPrivateUse1HooksInterface(new Hooks());
  }
} start;

}  // namespace
}  // namespace testgpu

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &testgpu::sdp_choice)
}
