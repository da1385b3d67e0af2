// The Python module lohan._native. Each part of the native core binds itself; this file only lists them.
#include <nanobind/nanobind.h>

namespace lohan {
void bind_kernels(nanobind::module_ &module);
void bind_io(nanobind::module_ &module);
}  // namespace lohan

NB_MODULE(_native, module) {
    module.doc() = "Kernels and SSD engines of lohan, in C++17.";
    lohan::bind_kernels(module);
    lohan::bind_io(module);
}
