# Sources of the numeric kernels, one object per instruction set.
set(LOHAN_KERNEL_SOURCES native/src/bind_kernels.cpp)
