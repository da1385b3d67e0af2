// The kernels for x86-64 processors with avx2; flags in native/kernels.cmake.
#define LOHAN_ISA avx2
#include "kernels.inc"
