// Checks, threads and ranges around the loops of kernels.inc.
#include <algorithm>
#include <atomic>
#include <initializer_list>
#include <stdexcept>

#include "lohan/kernels.hpp"
#include "parallel_pieces.hpp"

namespace lohan {
namespace {

// About a megabyte of state: large enough to hide a claim, small enough to share out evenly.
constexpr std::size_t piece_elements = 16 * leaf_elements;

std::size_t bytes_of(Format format) { return format == Format::fp32 ? 4 : 2; }

struct Array {
    const char *name;
    const void *start;
    std::size_t element_bytes;
};

bool overlap(const void *first, std::size_t first_bytes, const void *second,
             std::size_t second_bytes) {
    const auto a = reinterpret_cast<std::uintptr_t>(first);
    const auto b = reinterpret_cast<std::uintptr_t>(second);
    return a < b + second_bytes && b < a + first_bytes;
}

[[noreturn]] void refuse(const std::string &what) { throw std::invalid_argument(what); }

// Null, misaligned or overlapping arrays would be undefined behaviour in the loops.
void check_arrays(std::initializer_list<Array> arrays, std::size_t num_elements) {
    if (num_elements == 0) return;
    if (num_elements > static_cast<std::size_t>(PTRDIFF_MAX) / 8)
        refuse("num_elements " + std::to_string(num_elements) + " is beyond the address space");
    for (const Array &array : arrays) {
        const auto address = reinterpret_cast<std::uintptr_t>(array.start);
        if (address == 0) refuse(std::string(array.name) + " has address 0");
        if (address % array.element_bytes != 0)
            refuse(std::string(array.name) + " starts at an address that is not a multiple of " +
                   std::to_string(array.element_bytes) + " bytes, its element size");
        for (const Array &other : arrays) {
            if (&other == &array) break;
            if (overlap(array.start, num_elements * array.element_bytes, other.start,
                        num_elements * other.element_bytes))
                refuse(std::string(other.name) + " and " + array.name + " overlap in memory");
        }
    }
}

void check_options(const CallOptions &options) {
    if (options.num_threads == 0) refuse("num_threads is 0");
}

void check_ranges(const std::vector<UpdateRange> &ranges, std::size_t num_elements) {
    std::size_t covered_until = 0;
    for (std::size_t i = 0; i < ranges.size(); ++i) {
        const UpdateRange &range = ranges[i];
        if (range.begin < covered_until || range.end < range.begin || range.end > num_elements)
            refuse("range " + std::to_string(i) + " [" + std::to_string(range.begin) + ", " +
                   std::to_string(range.end) + ") must ascend, follow element " +
                   std::to_string(covered_until) + " and end within " +
                   std::to_string(num_elements) + " elements");
        covered_until = range.end;
    }
}

// Calls update(part) for the parts of all ranges, in pieces on the threads.
template <class Update>
void for_each_part(const std::vector<UpdateRange> &ranges, std::size_t num_elements,
                   const CallOptions &options, const Update &update) {
    for_each_piece(
        num_elements, piece_elements, options.num_threads,
        [&](std::size_t begin, std::size_t end) {
            auto range = std::partition_point(
                ranges.begin(), ranges.end(),
                [begin](const UpdateRange &one) { return one.end <= begin; });
            for (; range != ranges.end() && range->begin < end; ++range) {
                UpdateRange part = *range;
                part.begin = std::max(part.begin, begin);
                part.end = std::min(part.end, end);
                update(part);
            }
        });
}

}  // namespace

void adamw_split(const void *grad, Format grad_format, const SplitState &state,
                 std::size_t num_elements, const std::vector<UpdateRange> &ranges,
                 const StepScalars &scalars, const CallOptions &options) {
    const KernelTable &kernels = kernels_of(options.isa);
    check_options(options);
    check_ranges(ranges, num_elements);
    check_arrays({{"grad", grad, bytes_of(grad_format)},
                  {"p16", state.p16, 2},
                  {"lo16", state.lo16, 2},
                  {"m32", state.m32, 4},
                  {"v32", state.v32, 4}},
                 num_elements);
    const auto update = kernels.adamw_split[static_cast<int>(grad_format)];
    for_each_part(ranges, num_elements, options,
                  [&](const UpdateRange &part) { update(grad, state, part, scalars); });
}

void adamw_plain(const void *grad, Format grad_format, const PlainState &state, Compute compute,
                 std::size_t num_elements, const std::vector<UpdateRange> &ranges,
                 const StepScalars &scalars, const CallOptions &options) {
    const KernelTable &kernels = kernels_of(options.isa);
    check_options(options);
    check_ranges(ranges, num_elements);
    const Array grads = {"grad", grad, bytes_of(grad_format)}, p32 = {"p32", state.p32, 4},
                m32 = {"m32", state.m32, 4}, v32 = {"v32", state.v32, 4};
    if (compute == Compute::none)
        check_arrays({grads, p32, m32, v32}, num_elements);
    else
        check_arrays({grads, p32, m32, v32, {"p16", state.p16, 2}}, num_elements);
    const auto update =
        kernels.adamw_plain[static_cast<int>(grad_format)][static_cast<int>(compute)];
    for_each_part(ranges, num_elements, options,
                  [&](const UpdateRange &part) { update(grad, state, part, scalars); });
}

std::uint64_t sum_of_squares(const void *grad, Format format, std::size_t num_elements,
                             double *leaf_sums, const CallOptions &options) {
    const KernelTable &kernels = kernels_of(options.isa);
    check_options(options);
    check_arrays({{"grad", grad, bytes_of(format)}}, num_elements);
    const std::size_t num_leaves = (num_elements + leaf_elements - 1) / leaf_elements;
    check_arrays({{"leaf_sums", leaf_sums, 8}}, num_leaves);
    if (overlap(grad, num_elements * bytes_of(format), leaf_sums, num_leaves * sizeof(double)))
        refuse("grad and leaf_sums overlap in memory");
    const auto sum = kernels.sum_of_squares[static_cast<int>(format)];
    static_assert(piece_elements % leaf_elements == 0, "pieces are cut at leaf boundaries");
    std::atomic<std::uint64_t> num_nonfinite{0};
    for_each_piece(num_elements, piece_elements, options.num_threads,
                   [&](std::size_t begin, std::size_t end) {
                       const auto *start = static_cast<const char *>(grad);
                       num_nonfinite.fetch_add(
                           sum(start + begin * bytes_of(format), end - begin,
                               leaf_sums + begin / leaf_elements),
                           std::memory_order_relaxed);
                   });
    return num_nonfinite.load();
}

double combined_leaf_sums(const double *leaf_sums, std::size_t num_leaves) {
    check_arrays({{"leaf_sums", leaf_sums, 8}}, num_leaves);
    const DefaultFloatEnvironment environment;
    // A binary counter of finished subtrees: sums[k] holds 2^k leaves when bit k is set.
    double sums[64] = {};
    for (std::size_t i = 0; i < num_leaves; ++i) {
        double sum = leaf_sums[i];
        int level = 0;
        for (; (i >> level) & 1u; ++level) sum = sums[level] + sum;
        sums[level] = sum;
    }
    // What remains are left halves of falling size; the innermost right half comes first.
    double total = 0.0;
    bool has_total = false;
    for (int level = 0; level < 64; ++level) {
        if (!((num_leaves >> level) & 1u)) continue;
        total = has_total ? sums[level] + total : sums[level];
        has_total = true;
    }
    return total != total ? __builtin_nan("") : total;
}

void convert(const void *from, Format from_format, void *to, Format to_format,
             std::size_t num_elements, const CallOptions &options) {
    const KernelTable &kernels = kernels_of(options.isa);
    check_options(options);
    const bool is_widening = to_format == Format::fp32 && from_format != Format::fp32;
    const bool is_narrowing = from_format == Format::fp32 && to_format != Format::fp32;
    if (!is_widening && !is_narrowing) refuse("convert goes from fp32 or to fp32, one of the two");
    check_arrays({{"from", from, bytes_of(from_format)}, {"to", to, bytes_of(to_format)}},
                 num_elements);
    const auto *start = static_cast<const char *>(from);
    auto *target = static_cast<char *>(to);
    for_each_piece(
        num_elements, piece_elements, options.num_threads,
        [&](std::size_t begin, std::size_t end) {
            const char *source = start + begin * bytes_of(from_format);
            char *sink = target + begin * bytes_of(to_format);
            if (is_widening)
                kernels.to_fp32[static_cast<int>(from_format)](
                    source, reinterpret_cast<float *>(sink), end - begin);
            else
                kernels.from_fp32[static_cast<int>(to_format)](
                    reinterpret_cast<const float *>(source), sink, end - begin);
        });
}

void split_masters(const float *p32, const SplitState &state, std::size_t num_elements,
                   const CallOptions &options) {
    const KernelTable &kernels = kernels_of(options.isa);
    check_options(options);
    check_arrays({{"p32", p32, 4}, {"p16", state.p16, 2}, {"lo16", state.lo16, 2},
                  {"v32", state.v32, 4}},
                 num_elements);
    for_each_piece(num_elements, piece_elements, options.num_threads,
                   [&](std::size_t begin, std::size_t end) {
                       kernels.split_masters(p32 + begin, state.p16 + begin, state.lo16 + begin,
                                             state.v32 + begin, end - begin);
                   });
}

void join_masters(const SplitState &state, float *p32, std::size_t num_elements,
                  const CallOptions &options) {
    const KernelTable &kernels = kernels_of(options.isa);
    check_options(options);
    check_arrays({{"p16", state.p16, 2}, {"lo16", state.lo16, 2}, {"v32", state.v32, 4},
                  {"p32", p32, 4}},
                 num_elements);
    for_each_piece(num_elements, piece_elements, options.num_threads,
                   [&](std::size_t begin, std::size_t end) {
                       kernels.join_masters(state.p16 + begin, state.lo16 + begin,
                                            state.v32 + begin, p32 + begin, end - begin);
                   });
}

void stream_split(const std::uint16_t *grad, const SplitState &state, std::size_t num_elements,
                  const CallOptions &options) {
    const KernelTable &kernels = kernels_of(options.isa);
    check_options(options);
    check_arrays({{"grad", grad, 2}, {"p16", state.p16, 2}, {"lo16", state.lo16, 2},
                  {"m32", state.m32, 4}, {"v32", state.v32, 4}},
                 num_elements);
    for_each_piece(num_elements, piece_elements, options.num_threads,
                   [&](std::size_t begin, std::size_t end) {
                       const SplitState part = {state.p16 + begin, state.lo16 + begin,
                                                state.m32 + begin, state.v32 + begin};
                       kernels.stream_split(grad + begin, part, end - begin);
                   });
}

}  // namespace lohan
