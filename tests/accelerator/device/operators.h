// Every operator without a kernel of its own: the CPU's, queued, over the device's memory.
//
// What results look like is asked of the meta device, so that they exist when the call returns.
// Where that depends on values, the call waits for the stream, as it does on a GPU.
#pragma once
#include "launching.h"
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <unordered_set>

namespace testgpu {

using c10::IValue;
using torch::jit::Stack;
constexpr c10::DispatchKeySet kCpuKey(c10::DispatchKey::CPU);

const std::unordered_set<std::string> kMayMixSides{
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
    "aten::_unsafe_index", "aten::_unsafe_index_put"};

std::mutex waited_mutex;
std::map<std::string, int64_t> waited_for;  // operators that cannot be queued, and how often

/// A tensor as queued work sees it. Main memory is refused but for scalars and indices.
at::Tensor argument(const c10::OperatorHandle& op, const at::Tensor& t) {
  if (!t.defined()) return t;
  if (is_here(t)) return as_cpu(t);
  TORCH_CHECK(
      t.dim() == 0 || kMayMixSides.count(op.schema().name()),
      "Expected all tensors to be on the same device, but ", op.schema().operator_name(),
      " was given one of shape ", t.sizes(), " on ", t.device(), " and others on testgpu");
  auto copy = t.clone();  // read when the work is queued
  if (t.unsafeGetTensorImpl()->is_wrapped_number())
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

/// A value of a call with its tensors changed, and devices named in it replaced.
template <class Change>
IValue changed(const IValue& value, Change change, Device device) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& one : value.toTensorVector()) list.push_back(change(one));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector())
      list.push_back(one.has_value() ? std::optional<at::Tensor>(change(*one)) : std::nullopt);
    return list;
  }
  if (value.isDevice()) return device;
  return value;
}

/// Which operator of the CPU stands for one that backends are meant to bring.
c10::OperatorHandle cpu_operator(const c10::OperatorHandle& op, Stack& args) {
  const auto& name = op.schema().name();
  auto find = [](const char* other) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(other, "");
  };
  if (name == "aten::convolution_overrideable") return find("aten::convolution");
  if (name == "aten::convolution_backward_overrideable") {
    // The CPU's wants the size of the bias, which is the channels of the gradient.
    args.insert(args.begin() + 3, IValue(std::vector<int64_t>{args[0].toTensor().size(1)}));
    return find("aten::convolution_backward");
  }
  return op;
}

/// One call of an operator: what was given, and what the CPU's kernel will be given.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op),
        schema_(op.schema()),
        stack_(stack),
        given_(stack->end() - op.schema().arguments().size(), stack->end()) {
    stack_->resize(stack_->size() - given_.size());
    int64_t numel = 0;
    for (size_t i = 0; i < given_.size(); ++i) {
      const auto& value = given_[i];
      if (value.isTensor() && value.toTensor().defined())
        numel = std::max(numel, value.toTensor().numel());
      args_.push_back(changed(
          value, [&](const at::Tensor& t) { return argument(op_, t); }, Device(at::kCPU)));
      const auto& type = schema_.arguments()[i].type();
      if (value.isNone() && type->kind() == c10::TypeKind::OptionalType &&
          type->castRaw<c10::OptionalType>()->getElementType()->kind() ==
              c10::TypeKind::GeneratorType)
        args_.back() = next_generator(numel);
    }
    look_at_results();
  }

  void run() {
    auto target = cpu_operator(op_, args_);
    const bool is_sized = !must_resize_ || size_for_results();
    if (writes_any_ && is_sized && (writes_all_ || schema_.returns().empty())) {
      launch([target, args = args_, sized = sized_] {
        Stack own = args;
        // The CPU may change the size of these while it works, and cannot where the memory is ours.
        for (auto i : sized)
          own[i] = at::empty({0}, args[i].toTensor().options());
        const Stack given = own;
        target.redispatchBoxed(kCpuKey, &own);
        for (auto i : sized) args[i].toTensor().copy_(given[i].toTensor());
      });
      return_written();
    } else if (!(makes_all_ && !writes_any_ && queue_with_new_results(target))) {
      wait_and_run(target);
    }
  }

 private:
  void look_at_results() {
    writes_all_ = makes_all_ = !schema_.returns().empty();
    for (const auto& result : schema_.returns()) {
      const auto* alias = result.alias_info();
      TORCH_CHECK(alias == nullptr || alias->isWrite(), schema_.operator_name(),
                  " is a view, and the test accelerator has no kernel for it");
      writes_all_ &= alias != nullptr;
      makes_all_ &= alias == nullptr && result.type()->kind() == c10::TypeKind::TensorType;
    }
    // Where results go is given: with its size (structured kernels have made it), or to be resized.
    for (size_t i = 0; i < given_.size(); ++i) {
      if (!writes(i)) continue;
      writes_any_ = true;
      must_resize_ |= schema_.arguments()[i].kwarg_only() && given_[i].isTensor() &&
          (given_[i].toTensor().numel() == 0 || given_[i].toTensor().dim() == 0);
    }
  }

  bool writes(size_t i) const {
    const auto* alias = schema_.arguments()[i].alias_info();
    return alias != nullptr && alias->isWrite();
  }

  void return_written() {
    for (const auto& result : schema_.returns())
      for (size_t i = 0; i < given_.size(); ++i) {
        const auto* alias = schema_.arguments()[i].alias_info();
        if (alias != nullptr && result.alias_info() != nullptr && *alias == *result.alias_info()) {
          stack_->push_back(given_[i]);
          break;
        }
      }
  }

  /// What was given, without memory.
  Stack shapes_of_given() const {
    Stack shapes;
    auto without_memory = [](const at::Tensor& t) {
      if (!is_here(t)) return t;
      auto shape = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
      if (t.is_conj()) shape._set_conj(true);
      if (t.is_neg()) shape._set_neg(true);
      return shape;
    };
    for (const auto& value : given_)
      shapes.push_back(changed(value, without_memory, Device(at::kMeta)));
    return shapes;
  }

  /// Gives what results go to the size they will have. False where that depends on values, or where
  /// there is something in it.
  bool size_for_results() {
    const auto shapes = shapes_of_given();
    try {
      Stack own = shapes;
      cpu_operator(op_, own).callBoxed(&own);
    } catch (const std::exception&) {
      return false;
    }
    for (size_t i = 0; i < given_.size(); ++i) {
      if (!writes(i) || !schema_.arguments()[i].kwarg_only() || !given_[i].isTensor()) continue;
      const auto& to = given_[i].toTensor();
      const auto sizes = shapes[i].toTensor().sizes();
      if (to.sizes() != sizes) {
        if (to.numel() != 0) return false;
        at::native::resize_(to, sizes, std::nullopt);
        args_[i] = as_cpu(to);
      }
      sized_.push_back(i);
    }
    return true;
  }

  /// Results without memory, or nothing where they depend on values.
  std::optional<Stack> shapes_of_results() {
    Stack results;
    try {
      results = shapes_of_given();
      cpu_operator(op_, results).callBoxed(&results);
    } catch (const std::exception&) {
      return std::nullopt;
    }
    if (results.size() != schema_.returns().size()) return std::nullopt;
    for (const auto& one : results)
      if (!one.isTensor() ||
          (one.toTensor().defined() && one.toTensor().layout() != at::kStrided))
        return std::nullopt;
    return results;
  }

  at::ScalarType dtype_of_result(size_t index, const at::Tensor& shape) const {
    // Shapes are inferred for GPUs, which keep these statistics in fp32; the CPU does not.
    const bool has_statistics = schema_.name() == "aten::native_layer_norm" && index > 0;
    const bool has_other_weight = has_statistics && given_[2].isTensor() &&
        given_[2].toTensor().defined() &&
        given_[2].toTensor().dtype() != given_[0].toTensor().dtype();
    return has_statistics && !has_other_weight ? given_[0].toTensor().scalar_type()
                                               : shape.scalar_type();
  }

  bool queue_with_new_results(const c10::OperatorHandle& target) {
    auto shapes = shapes_of_results();
    if (!shapes.has_value()) return false;
    std::vector<at::Tensor> made;
    for (const auto& one : *shapes) {
      const auto& shape = one.toTensor();
      at::Tensor own;
      if (shape.defined())
        own = empty_here(shape.sizes(), shape.strides(), dtype_of_result(made.size(), shape));
      made.push_back(own.defined() ? as_cpu(own) : own);
      stack_->push_back(own);
    }
    launch([target, args = args_, made = std::move(made)] {
      Stack own = args;
      target.redispatchBoxed(kCpuKey, &own);
      for (size_t i = 0; i < made.size(); ++i) {
        const auto& found = own.at(i).toTensor();
        if (!found.defined() || !made[i].defined()) continue;
        TORCH_CHECK(found.sizes() == made[i].sizes() && found.dtype() == made[i].dtype(),
                    target.operator_name(), ": result ", i, " is ", found.sizes(), " ",
                    found.dtype(), ", expected ", made[i].sizes(), " ", made[i].dtype());
        made[i].copy_(found);
      }
    });
    return true;
  }

  void wait_and_run(const c10::OperatorHandle& target) {
    {
      std::lock_guard<std::mutex> lock(waited_mutex);
      ++waited_for[c10::toString(schema_.operator_name())];
    }
    drain_current();
    std::vector<size_t> replaced;
    for (size_t i = 0; must_resize_ && i < given_.size(); ++i) {
      if (!writes(i) || !schema_.arguments()[i].kwarg_only() || !given_[i].isTensor()) continue;
      // Memory known by its address cannot grow: the CPU gets a tensor of its own to fill.
      args_[i] = at::empty({0}, given_[i].toTensor().options().device(at::kCPU));
      replaced.push_back(i);
    }
    Stack own = args_;
    target.redispatchBoxed(kCpuKey, &own);
    for (auto i : replaced) {
      const auto& before = given_[i].toTensor();
      const auto& after = args_[i].toTensor();
      if (before.sizes() != after.sizes()) before.resize_(after.sizes());
      drain_current();
      as_cpu(before).copy_(after);
    }
    if (writes_all_ || schema_.returns().empty()) {
      return_written();
      return;
    }
    auto moved = [](const at::Tensor& t) { return to_device(t); };
    for (const auto& result : own) stack_->push_back(changed(result, moved, Device(kDevice, 0)));
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack* stack_;
  const Stack given_;
  Stack args_;
  std::vector<size_t> sized_;
  bool writes_all_ = false, makes_all_ = false, writes_any_ = false, must_resize_ = false;
};

void any_operator(const c10::OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  Call(op, stack).run();
}

}  // namespace testgpu
