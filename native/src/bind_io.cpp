#include <nanobind/nanobind.h>

namespace lohan {
void bind_io(nanobind::module_ &) {}
}  // namespace lohan
