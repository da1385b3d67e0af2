// The contract between the kernels and their dispatch: plain types and one table of function
// pointers per instruction set. No inline function may be added here: this header is compiled
// with several instruction sets, and the linker would keep one copy for all of them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lohan {

enum class Format : int { bf16 = 0, fp16 = 1, fp32 = 2 };
constexpr int num_formats = 3;

// What the plain update writes beside P32.
enum class Compute : int { none = 0, bf16 = 1, fp16 = 2 };
constexpr int num_computes = 3;

// Scalars of one step, rounded to fp32 once, by the caller.
struct StepScalars {
    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float eps;  // eps * sqrt(1 - beta2^step)
    float grad_scale;
};

// Elements [begin, end) of a chunk share a learning rate and a weight decay.
struct UpdateRange {
    std::size_t begin;
    std::size_t end;
    float step_size;  // lr * sqrt(1 - beta2^step) / (1 - beta1^step)
    float decay;      // lr * weight_decay
};

// Sums of squares are made per leaf: so many elements, counted from the chunk's first one.
constexpr std::size_t leaf_elements = 4096;

struct SplitState {
    std::uint16_t *p16;
    std::uint16_t *lo16;
    float *m32;
    float *v32;  // the sign bit is the rounding tie of the master weight
};

struct PlainState {
    float *p32;
    float *m32;
    float *v32;
    std::uint16_t *p16;  // null for Compute::none
};

// Every function works on whole ranges it is given, on the calling thread.
struct KernelTable {
    const char *isa;
    void (*adamw_split[num_formats])(const void *grad, const SplitState &state,
                                     const UpdateRange &range, const StepScalars &scalars);
    void (*adamw_plain[num_formats][num_computes])(const void *grad, const PlainState &state,
                                                   const UpdateRange &range,
                                                   const StepScalars &scalars);
    // Writes one sum per leaf; returns how many elements are infinite or NaN.
    std::uint64_t (*sum_of_squares[num_formats])(const void *grad, std::size_t num_elements,
                                                 double *leaf_sums);
    void (*to_fp32[num_formats])(const void *from, float *to, std::size_t num_elements);
    void (*from_fp32[num_formats])(const float *from, void *to, std::size_t num_elements);
    void (*split_masters)(const float *p32, std::uint16_t *p16, std::uint16_t *lo16, float *v32,
                          std::size_t num_elements);
    void (*join_masters)(const std::uint16_t *p16, const std::uint16_t *lo16, const float *v32,
                         float *p32, std::size_t num_elements);
    // Reads and rewrites the bytes adamw_split moves, without its arithmetic.
    void (*stream_split)(const std::uint16_t *grad, const SplitState &state,
                         std::size_t num_elements);
};

}  // namespace lohan
