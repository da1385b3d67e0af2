// The kernels for x86-64 processors with avx512 (F, BW, DQ, VL); flags in native/kernels.cmake.
#define LOHAN_ISA avx512
#include "kernels.inc"
