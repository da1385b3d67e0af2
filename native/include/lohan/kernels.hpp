// The numeric calls of the native core: threads, checks and the choice of instruction set around
// the loops of kernels.inc. Addresses and element counts only: no torch, no numpy, no Python.
//
// All calls: runs on the caller and on num_threads - 1 threads that end before it returns; may
// block until done; owns the arrays until it returns; may be called from several threads at once
// on arrays that do not overlap. Results do not depend on the number of threads, on how a range is
// cut into calls, on alignment beyond that of one element, or on the instruction set.
// Bad arguments raise std::invalid_argument before anything is written.
#pragma once

#include <string>
#include <vector>

#include "lohan/kernel_table.hpp"

namespace lohan {

// Instruction sets of this binary that this processor can run, the best one first.
std::vector<std::string> available_isas();
// All instruction sets compiled into this binary.
std::vector<std::string> compiled_isas();
// The kernels of a named set; the best available for "". Raises if it is not available here.
const KernelTable &kernels_of(const std::string &isa);

struct CallOptions {
    unsigned num_threads = 1;
    std::string isa;
};

// Elements outside all ranges are left as they are. Ranges ascend and do not overlap.
void adamw_split(const void *grad, Format grad_format, const SplitState &state,
                 std::size_t num_elements, const std::vector<UpdateRange> &ranges,
                 const StepScalars &scalars, const CallOptions &options);

void adamw_plain(const void *grad, Format grad_format, const PlainState &state, Compute compute,
                 std::size_t num_elements, const std::vector<UpdateRange> &ranges,
                 const StepScalars &scalars, const CallOptions &options);

// Writes one fp64 sum per leaf of leaf_elements; returns the count of infinities and NaNs.
std::uint64_t sum_of_squares(const void *grad, Format format, std::size_t num_elements,
                             double *leaf_sums, const CallOptions &options);

// Adds leaf sums as a tree: left half (the largest power of two below the count) plus the rest.
double combined_leaf_sums(const double *leaf_sums, std::size_t num_leaves);

void convert(const void *from, Format from_format, void *to, Format to_format,
             std::size_t num_elements, const CallOptions &options);

void split_masters(const float *p32, const SplitState &state, std::size_t num_elements,
                   const CallOptions &options);

void join_masters(const SplitState &state, float *p32, std::size_t num_elements,
                  const CallOptions &options);

// Moves the bytes adamw_split moves and does no arithmetic: the ceiling of this machine.
void stream_split(const std::uint16_t *grad, const SplitState &state, std::size_t num_elements,
                  const CallOptions &options);

}  // namespace lohan
