// Python's door to the kernels: turns numbers into pointers and names into formats, releases the
// GIL. Arrays arrive as addresses, so buffers of the SSD engine need no torch. Called by
// lohan.optimizer, which checks what an address cannot tell.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "gil_released.hpp"
#include "lohan/kernels.hpp"
#include "lohan/tiles.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace lohan {
namespace {

using Address = std::uintptr_t;
using Range = std::tuple<std::size_t, std::size_t, float, float>;
using Scalars = std::tuple<float, float, float, float, float, float>;

template <class T>
T *pointer(Address address) {
    return reinterpret_cast<T *>(address);
}

Format format_of(const std::string &name) {
    if (name == "bf16") return Format::bf16;
    if (name == "fp16") return Format::fp16;
    if (name == "fp32") return Format::fp32;
    throw std::invalid_argument("number format '" + name + "' is none of bf16, fp16, fp32");
}

Compute compute_of(const std::string &name) {
    if (name.empty()) return Compute::none;
    if (name == "bf16") return Compute::bf16;
    if (name == "fp16") return Compute::fp16;
    throw std::invalid_argument("compute format '" + name + "' is none of bf16, fp16");
}

std::vector<UpdateRange> ranges_of(const std::vector<Range> &tuples) {
    std::vector<UpdateRange> ranges;
    ranges.reserve(tuples.size());
    for (const auto &[begin, end, step_size, decay] : tuples)
        ranges.push_back({begin, end, step_size, decay});
    return ranges;
}

StepScalars scalars_of(const Scalars &tuple) {
    const auto &[beta1, one_minus_beta1, beta2, one_minus_beta2, eps, scale] = tuple;
    return {beta1, one_minus_beta1, beta2, one_minus_beta2, eps, scale};
}

SplitState split_of(Address p16, Address lo16, Address m32, Address v32) {
    return {pointer<std::uint16_t>(p16), pointer<std::uint16_t>(lo16), pointer<float>(m32),
            pointer<float>(v32)};
}

}  // namespace

void bind_kernels(nb::module_ &module) {
    module.attr("LEAF_ELEMENTS") = leaf_elements;
    module.def("kernel_isa", [] { return available_isas().front(); });
    module.def("available_kernel_isas", &available_isas);
    module.def("compiled_kernel_isas", &compiled_isas);
    module.def("probe_tiles", &probe_tiles, nb::call_guard<GilReleased>());

    module.def(
        "adamw_split",
        [](Address grad, const std::string &grad_format, Address p16, Address lo16, Address m32,
           Address v32, std::size_t num_elements, const std::vector<Range> &ranges,
           const Scalars &scalars, unsigned num_threads, const std::string &isa) {
            const GilReleased released;
            adamw_split(pointer<const void>(grad), format_of(grad_format),
                        split_of(p16, lo16, m32, v32), num_elements, ranges_of(ranges),
                        scalars_of(scalars), {num_threads, isa});
        },
        nb::kw_only(), "grad"_a, "grad_format"_a, "p16"_a, "lo16"_a, "m32"_a, "v32"_a,
        "num_elements"_a, "ranges"_a, "scalars"_a, "num_threads"_a, "isa"_a = "");

    module.def(
        "adamw_plain",
        [](Address grad, const std::string &grad_format, Address p32, Address m32, Address v32,
           Address p16, const std::string &p16_format, std::size_t num_elements,
           const std::vector<Range> &ranges, const Scalars &scalars, unsigned num_threads,
           const std::string &isa) {
            const GilReleased released;
            const PlainState state = {pointer<float>(p32), pointer<float>(m32),
                                      pointer<float>(v32), pointer<std::uint16_t>(p16)};
            adamw_plain(pointer<const void>(grad), format_of(grad_format), state,
                        compute_of(p16_format), num_elements, ranges_of(ranges),
                        scalars_of(scalars), {num_threads, isa});
        },
        nb::kw_only(), "grad"_a, "grad_format"_a, "p32"_a, "m32"_a, "v32"_a, "p16"_a = 0,
        "p16_format"_a = "", "num_elements"_a, "ranges"_a, "scalars"_a, "num_threads"_a,
        "isa"_a = "");

    module.def(
        "sum_of_squares",
        [](Address grad, const std::string &grad_format, std::size_t num_elements,
           Address leaf_sums, unsigned num_threads, const std::string &isa) {
            const GilReleased released;
            return sum_of_squares(pointer<const void>(grad), format_of(grad_format),
                                  num_elements, pointer<double>(leaf_sums), {num_threads, isa});
        },
        nb::kw_only(), "grad"_a, "grad_format"_a, "num_elements"_a, "leaf_sums"_a,
        "num_threads"_a, "isa"_a = "");

    module.def(
        "combined_leaf_sums",
        [](Address leaf_sums, std::size_t num_leaves) {
            const GilReleased released;
            return combined_leaf_sums(pointer<const double>(leaf_sums), num_leaves);
        },
        nb::kw_only(), "leaf_sums"_a, "num_leaves"_a);

    module.def(
        "convert",
        [](Address from, const std::string &from_format, Address to, const std::string &to_format,
           std::size_t num_elements, unsigned num_threads, const std::string &isa) {
            const GilReleased released;
            convert(pointer<const void>(from), format_of(from_format), pointer<void>(to),
                    format_of(to_format), num_elements, {num_threads, isa});
        },
        nb::kw_only(), "source"_a, "source_format"_a, "target"_a, "target_format"_a,
        "num_elements"_a, "num_threads"_a, "isa"_a = "");

    module.def(
        "split_masters",
        [](Address p32, Address p16, Address lo16, Address v32, std::size_t num_elements,
           unsigned num_threads, const std::string &isa) {
            const GilReleased released;
            split_masters(pointer<const float>(p32), split_of(p16, lo16, 0, v32), num_elements,
                          {num_threads, isa});
        },
        nb::kw_only(), "p32"_a, "p16"_a, "lo16"_a, "v32"_a, "num_elements"_a, "num_threads"_a,
        "isa"_a = "");

    module.def(
        "join_masters",
        [](Address p16, Address lo16, Address v32, Address p32, std::size_t num_elements,
           unsigned num_threads, const std::string &isa) {
            const GilReleased released;
            join_masters(split_of(p16, lo16, 0, v32), pointer<float>(p32), num_elements,
                         {num_threads, isa});
        },
        nb::kw_only(), "p16"_a, "lo16"_a, "v32"_a, "p32"_a, "num_elements"_a, "num_threads"_a,
        "isa"_a = "");

    module.def(
        "stream_split",
        [](Address grad, Address p16, Address lo16, Address m32, Address v32,
           std::size_t num_elements, unsigned num_threads, const std::string &isa) {
            const GilReleased released;
            stream_split(pointer<const std::uint16_t>(grad), split_of(p16, lo16, m32, v32),
                         num_elements, {num_threads, isa});
        },
        nb::kw_only(), "grad"_a, "p16"_a, "lo16"_a, "m32"_a, "v32"_a, "num_elements"_a,
        "num_threads"_a, "isa"_a = "");
}

}  // namespace lohan
