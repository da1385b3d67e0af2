// Python faces of aligned memory and checksums.
#include <nanobind/nanobind.h>

#include <cstdint>
#include <system_error>

#include "gil_released.hpp"
#include "lohan/aligned_memory.hpp"
#include "lohan/crc32c.hpp"

namespace nb = nanobind;

namespace lohan {

namespace {

// A view (memoryview, numpy array) holds a reference to the object, so the memory outlives every view.
int get_buffer(PyObject *self, Py_buffer *view, int flags) {
    const auto *memory = nb::inst_ptr<AlignedMemory>(nb::handle(self));
    return PyBuffer_FillInfo(view, self, memory->address(), static_cast<Py_ssize_t>(memory->nbytes()), 0, flags);
}

PyType_Slot kMemorySlots[] = {{Py_bf_getbuffer, reinterpret_cast<void *>(get_buffer)}, {0, nullptr}};

const void *as_pointer(std::uint64_t address) {
    return reinterpret_cast<const void *>(static_cast<std::uintptr_t>(address));
}

}  // namespace

void bind_buffers(nb::module_ &module) {
    nb::class_<AlignedMemory>(module, "AlignedMemory", nb::type_slots(kMemorySlots))
        .def(nb::init<std::uint64_t, bool>(), nb::arg("nbytes"), nb::arg("should_populate"),
             nb::call_guard<GilReleased>())
        .def_prop_ro("address",
                     [](const AlignedMemory &memory) { return reinterpret_cast<std::uintptr_t>(memory.address()); })
        .def_prop_ro("nbytes", &AlignedMemory::nbytes)
        .def_prop_ro("mapped_bytes", &AlignedMemory::mapped_bytes);

    module.def(
        "crc32c",
        [](std::uint32_t before, std::uint64_t address, std::uint64_t nbytes) {
            return crc32c(before, as_pointer(address), nbytes);
        },
        nb::arg("before"), nb::arg("address"), nb::arg("nbytes"), nb::call_guard<GilReleased>());
    module.def(
        "crc32c_portable",
        [](std::uint32_t before, std::uint64_t address, std::uint64_t nbytes) {
            return crc32c_portable(before, as_pointer(address), nbytes);
        },
        nb::arg("before"), nb::arg("address"), nb::arg("nbytes"), nb::call_guard<GilReleased>());
    module.def("crc32c_join", &crc32c_join, nb::arg("first"), nb::arg("second"), nb::arg("second_nbytes"));
    module.def("crc32c_path", &crc32c_path);
}

}  // namespace lohan
