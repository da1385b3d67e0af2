// The kernels for every processor of the architecture: no flag beyond its baseline.
#if defined(__aarch64__)
#define LOHAN_ISA neon
#else
#define LOHAN_ISA portable
#endif
#include "kernels.inc"
