// The Python module lohan._native. Each part of the native core binds itself; this file only lists them.
#include <nanobind/nanobind.h>

namespace lohan {
void bind_kernels(nanobind::module_ &module);
void bind_io(nanobind::module_ &module);
}  // namespace lohan

NB_MODULE(_native, module) {
    // A program that ends while a daemon thread still holds a ticket is no cause for a report.
    nanobind::set_leak_warnings(false);
    module.doc() = "Kernels and SSD engines of lohan, in C++17.";
    lohan::bind_kernels(module);
    lohan::bind_io(module);
}
