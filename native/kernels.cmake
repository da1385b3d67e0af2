# Sources of the numeric kernels. kernels.inc is compiled once per instruction set, each time in a
# namespace and a translation unit of its own; dispatch picks one at run time.
set(LOHAN_KERNEL_SOURCES
    native/src/bind_kernels.cpp
    native/src/kernel_calls.cpp
    native/src/kernel_dispatch.cpp
    native/src/kernels_portable.cpp
    native/src/parallel_pieces.cpp
    native/src/tiles.cpp)

# No contraction, no errno, no trap handlers: every value is the IEEE result of the written order.
# -fno-trapping-math changes no value, it only lets comparisons be vectorised.
set(LOHAN_KERNEL_FLAGS -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math)
set_source_files_properties(native/src/kernels_portable.cpp PROPERTIES COMPILE_OPTIONS
                            "${LOHAN_KERNEL_FLAGS}")

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND LOHAN_KERNEL_SOURCES native/src/kernels_avx2.cpp native/src/kernels_avx512.cpp)
  set_source_files_properties(native/src/kernels_avx2.cpp PROPERTIES COMPILE_OPTIONS
                              "${LOHAN_KERNEL_FLAGS};-mavx2;-mtune=skylake")
  set_source_files_properties(
    native/src/kernels_avx512.cpp
    PROPERTIES
      COMPILE_OPTIONS
      "${LOHAN_KERNEL_FLAGS};-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mprefer-vector-width=512")
endif()
