// Python faces of the engines and, as a test seam, of the queue that orders their blocks.
//
// No Python object is ever reachable from an I/O thread: files and tickets are held through shared
// pointers of plain C++ objects, so those threads never need the interpreter's lock. Calls that may
// block release it; `start` does not, because taking it back could cost a whole switch interval.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <cerrno>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <tuple>

#include "gil_released.hpp"
#include "lohan/io_engine.hpp"

namespace nb = nanobind;

namespace lohan {

void bind_buffers(nb::module_ &module);

namespace {

struct FileHandle {
    std::shared_ptr<File> file;

    const File &opened() const {
        if (file == nullptr) throw EngineUnusable("the file is closed");
        return *file;
    }
};

struct TicketHandle {
    std::shared_ptr<Ticket> ticket;
};

using BlockTuple = std::tuple<std::uint64_t, int, std::uint64_t, std::uint64_t>;

DriveSettings make_settings(std::uint32_t max_requests, std::uint64_t max_bytes, std::uint64_t block_bytes,
                            bool is_simplex, std::uint64_t fairness_bytes) {
    return {max_requests, max_bytes, block_bytes, is_simplex, fairness_bytes};
}

void raise_os_error(const std::exception_ptr &pointer, void *) {
    try {
        std::rethrow_exception(pointer);
    } catch (const std::system_error &error) {
        PyObject *arguments = Py_BuildValue("(is)", error.code().value(), error.what());
        if (arguments == nullptr) return;
        PyErr_SetObject(PyExc_OSError, arguments);
        Py_DECREF(arguments);
    }
}

void bind_queue(nb::module_ &module) {
    nb::class_<DriveQueue>(module, "DriveQueue")
        .def(
            "__init__",
            [](DriveQueue *queue, std::uint32_t max_requests, std::uint64_t max_bytes, std::uint64_t block_bytes,
               bool is_simplex, std::uint64_t fairness_bytes) {
                new (queue)
                    DriveQueue(make_settings(max_requests, max_bytes, block_bytes, is_simplex, fairness_bytes));
            },
            nb::kw_only(), nb::arg("max_requests"), nb::arg("max_bytes"), nb::arg("block_bytes"),
            nb::arg("is_simplex"), nb::arg("fairness_bytes"))
        .def(
            "push",
            [](DriveQueue &queue, std::uint64_t request_id, int operation, int priority, std::uint64_t nbytes) {
                queue.push(request_id, static_cast<Operation>(operation), priority, nbytes);
            },
            nb::arg("request_id"), nb::arg("operation"), nb::arg("priority"), nb::arg("nbytes"))
        .def("next",
             [](DriveQueue &queue) -> std::optional<BlockTuple> {
                 const auto block = queue.next();
                 if (!block) return std::nullopt;
                 return BlockTuple{block->request_id, static_cast<int>(block->operation), block->start, block->nbytes};
             })
        .def(
            "finished",
            [](DriveQueue &queue, const BlockTuple &block) {
                queue.finished({std::get<0>(block), static_cast<Operation>(std::get<1>(block)), std::get<2>(block),
                                std::get<3>(block)});
            },
            nb::arg("block"))
        .def("drop", &DriveQueue::drop, nb::arg("request_id"))
        .def_prop_ro("num_in_flight", &DriveQueue::num_in_flight)
        .def_prop_ro("bytes_in_flight", &DriveQueue::bytes_in_flight)
        .def_prop_ro("is_idle", &DriveQueue::is_idle);
}

void bind_tickets_and_files(nb::module_ &module) {
    nb::class_<TicketHandle>(module, "IoTicket")
        .def_prop_ro("is_done", [](const TicketHandle &handle) { return handle.ticket->is_done(); })
        .def(
            "wait_for",
            [](const TicketHandle &handle, double seconds) {
                if (handle.ticket->is_done()) return true;
                const GilReleased released;
                return handle.ticket->wait_for(seconds);
            },
            nb::arg("seconds"))
        .def_prop_ro("error_number", [](const TicketHandle &handle) { return handle.ticket->outcome().error_number; })
        .def_prop_ro("is_short", [](const TicketHandle &handle) { return handle.ticket->outcome().is_short; })
        .def_prop_ro("got_bytes", [](const TicketHandle &handle) { return handle.ticket->outcome().got_bytes; });

    nb::class_<FileHandle>(module, "OpenFile")
        .def(
            "__init__",
            [](FileHandle *handle, std::string path, int descriptor, int drive, bool is_direct) {
                new (handle) FileHandle{std::make_shared<File>(std::move(path), descriptor, drive, is_direct)};
            },
            nb::arg("path"), nb::arg("descriptor"), nb::arg("drive"), nb::arg("is_direct"))
        .def_prop_ro("descriptor", [](const FileHandle &handle) { return handle.opened().descriptor(); })
        .def("close", [](FileHandle &handle) { handle.file.reset(); });
}

void bind_engine(nb::module_ &module) {
    nb::class_<DriveCounters>(module, "DriveCounters")
        .def_ro("num_started", &DriveCounters::num_started)
        .def_ro("num_finished", &DriveCounters::num_finished)
        .def_ro("num_failed", &DriveCounters::num_failed)
        .def_ro("num_blocks", &DriveCounters::num_blocks)
        .def_ro("num_continued", &DriveCounters::num_continued)
        .def_ro("num_retried", &DriveCounters::num_retried)
        .def_ro("read_bytes", &DriveCounters::read_bytes)
        .def_ro("written_bytes", &DriveCounters::written_bytes)
        .def_ro("max_in_flight", &DriveCounters::max_in_flight);

    nb::class_<IoEngine>(module, "IoEngine")
        .def(
            "__init__",
            [](IoEngine *engine, bool is_uring) {
                new (engine) IoEngine(is_uring ? EngineKind::kUring : EngineKind::kThreads);
            },
            nb::kw_only(), nb::arg("is_uring"))
        .def(
            "add_drive",
            [](IoEngine &engine, std::uint32_t max_requests, std::uint64_t max_bytes, std::uint64_t block_bytes,
               bool is_simplex, std::uint64_t fairness_bytes) {
                return engine.add_drive(
                    make_settings(max_requests, max_bytes, block_bytes, is_simplex, fairness_bytes));
            },
            nb::kw_only(), nb::arg("max_requests"), nb::arg("max_bytes"), nb::arg("block_bytes"),
            nb::arg("is_simplex"), nb::arg("fairness_bytes"))
        .def(
            "start",
            [](IoEngine &engine, int operation, const FileHandle &handle, std::uint64_t offset, std::uint64_t address,
               std::uint64_t nbytes, int priority) {
                handle.opened();
                return TicketHandle{engine.start(static_cast<Operation>(operation), handle.file, offset, address,
                                                 nbytes, priority)};
            },
            nb::arg("operation"), nb::arg("file"), nb::arg("offset"), nb::arg("address"), nb::arg("nbytes"),
            nb::arg("priority"))
        .def("close", &IoEngine::close, nb::call_guard<GilReleased>())
        .def(
            "counters", [](const IoEngine &engine, int drive) { return engine.drive(drive).counters(); },
            nb::arg("drive"))
        .def(
            "replace_result",
            [](IoEngine &engine, int drive, std::uint64_t nth, std::int64_t result) {
                engine.drive(drive).replace_result(nth, result);
            },
            nb::arg("drive"), nb::arg("nth"), nb::arg("result"));
}

}  // namespace

void bind_io(nb::module_ &module) {
    nb::register_exception_translator(raise_os_error);
    bind_buffers(module);
    bind_queue(module);
    bind_tickets_and_files(module);
    bind_engine(module);
    module.def("reserve_space", &reserve_space, nb::arg("descriptor"), nb::arg("from_bytes"), nb::arg("nbytes"),
               nb::call_guard<GilReleased>());
    module.def("probe_uring", &probe_uring);
    module.def("is_uring_compiled_in", &is_uring_compiled_in);
}

}  // namespace lohan
