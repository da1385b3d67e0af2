// needs: aligned_memory.cpp crc32c.cpp drive.cpp drive_queue.cpp io_engine.cpp mover_threads.cpp mover_uring.cpp transfer.cpp uring.cpp
// Engines, queue, checksums and memory without Python: made to run under sanitizers.
// Works in the directory given as first argument, else in TMPDIR or /var/tmp; leaves nothing behind.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "lohan/aligned_memory.hpp"
#include "lohan/crc32c.hpp"
#include "lohan/io_engine.hpp"

using namespace lohan;

namespace {

std::atomic<int> num_checks{0};

#define CHECK(condition)                                                               \
    do {                                                                               \
        ++num_checks;                                                                  \
        if (!(condition)) {                                                            \
            std::fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                              \
        }                                                                              \
    } while (false)

constexpr std::uint64_t kPage = kAlignmentBytes;

std::string directory = "/var/tmp";

std::uint64_t address_of(const AlignedMemory &memory) { return reinterpret_cast<std::uintptr_t>(memory.address()); }

void fill(const AlignedMemory &memory, unsigned seed) {
    auto *bytes = static_cast<unsigned char *>(memory.address());
    for (std::uint64_t index = 0; index < memory.nbytes(); ++index) {
        seed = seed * 1664525u + 1013904223u;
        bytes[index] = static_cast<unsigned char>(seed >> 24);
    }
}

std::shared_ptr<File> make_file(int drive, std::uint64_t nbytes) {
    std::string path = directory + "/io_test_XXXXXX";
    const int maker = ::mkstemp(path.data());
    CHECK(maker >= 0);
    int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_DIRECT);
    const bool is_direct = descriptor >= 0;
    if (!is_direct) descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    CHECK(descriptor >= 0);
    ::close(maker);
    ::unlink(path.c_str());
    if (nbytes > 0) CHECK(reserve_space(descriptor, 0, nbytes) == 0);
    return std::make_shared<File>(path, descriptor, drive, is_direct);
}

const Outcome &finish(const std::shared_ptr<Ticket> &ticket) {
    while (!ticket->wait_for(1.0)) {
    }
    return ticket->outcome();
}

std::shared_ptr<Ticket> start(IoEngine &engine, Operation operation, const std::shared_ptr<File> &file,
                              std::uint64_t offset, const AlignedMemory &memory, std::uint64_t nbytes,
                              std::uint64_t at = 0, int priority = 1) {
    return engine.start(operation, file, offset, address_of(memory) + at, nbytes, priority);
}

void test_checksums() {
    CHECK(crc32c(0, "123456789", 9) == 0xe3069283u);
    CHECK(crc32c(0, "", 0) == 0);
    std::vector<unsigned char> zeros(32, 0), ones(32, 0xff);
    CHECK(crc32c(0, zeros.data(), 32) == 0x8a9136aau);
    CHECK(crc32c(0, ones.data(), 32) == 0x62a8ab43u);
    AlignedMemory memory(100000, false);
    fill(memory, 1);
    const auto *bytes = static_cast<const char *>(memory.address());
    for (std::uint64_t nbytes : {0, 1, 7, 8, 9, 4095, 12288, 12289, 24577, 99990}) {
        for (std::uint64_t shift = 0; shift < 9; ++shift) {
            const auto whole = crc32c_portable(0, bytes + shift, nbytes);
            CHECK(crc32c(0, bytes + shift, nbytes) == whole);
            const auto half = nbytes / 3;
            const auto first = crc32c(0, bytes + shift, half);
            CHECK(crc32c(first, bytes + shift + half, nbytes - half) == whole);
            const auto second = crc32c(0, bytes + shift + half, nbytes - half);
            CHECK(crc32c_join(first, second, nbytes - half) == whole);
        }
    }
}

void test_memory() {
    for (std::uint64_t nbytes : {std::uint64_t{1}, kPage, kPage + 1, std::uint64_t{3} << 20}) {
        AlignedMemory memory(nbytes, true);
        CHECK(address_of(memory) % kPage == 0);
        CHECK(memory.nbytes() == nbytes);
        CHECK(memory.mapped_bytes() < nbytes + kPage);
        std::memset(memory.address(), 1, nbytes);
    }
}

void test_round_trip(EngineKind kind) {
    IoEngine engine(kind);
    DriveSettings settings;
    settings.max_requests = 4;
    settings.block_bytes = 8 * kPage;
    settings.max_bytes = 24 * kPage;
    const int drive = engine.add_drive(settings);
    constexpr std::uint64_t nbytes = 256 * kPage;
    const auto file = make_file(drive, nbytes);
    AlignedMemory source(nbytes, false), target(nbytes, false);
    fill(source, 2);
    CHECK(finish(start(engine, Operation::kWrite, file, 0, source, nbytes)).is_good());
    CHECK(finish(engine.start(Operation::kFlush, file, 0, 0, 0, 0)).is_good());
    const auto ticket = start(engine, Operation::kRead, file, 0, target, nbytes);
    CHECK(finish(ticket).got_bytes == nbytes);
    CHECK(std::memcmp(source.address(), target.address(), nbytes) == 0);
    const auto counters = engine.drive(drive).counters();
    CHECK(counters.num_started == 3 && counters.num_finished == 3 && counters.num_failed == 0);
    CHECK(counters.num_blocks == 32 + 32 + 1);
    CHECK(counters.max_in_flight <= 3);
}

// Several threads start and wait at once; each has its own part of the file and its own tickets.
void test_many_threads(EngineKind kind, bool is_simplex) {
    IoEngine engine(kind);
    DriveSettings settings;
    settings.max_requests = 8;
    settings.block_bytes = 4 * kPage;
    settings.is_simplex = is_simplex;
    settings.fairness_bytes = 32 * kPage;
    const int drives[2] = {engine.add_drive(settings), engine.add_drive(settings)};
    constexpr std::uint64_t part = 32 * kPage;
    constexpr int num_threads = 4, num_rounds = 20;
    const std::shared_ptr<File> files[2] = {make_file(drives[0], part * num_threads),
                                            make_file(drives[1], part * num_threads)};
    std::vector<std::thread> threads;
    for (int number = 0; number < num_threads; ++number) {
        threads.emplace_back([&, number] {
            AlignedMemory source(part, false), target(part, false);
            const auto &file = files[number % 2];
            const auto offset = static_cast<std::uint64_t>(number) * part;
            for (int round = 0; round < num_rounds; ++round) {
                fill(source, static_cast<unsigned>(number * 1000 + round));
                std::vector<std::shared_ptr<Ticket>> writes;
                for (std::uint64_t at = 0; at < part; at += 8 * kPage)
                    writes.push_back(start(engine, Operation::kWrite, file, offset + at, source, 8 * kPage, at, round % 4));
                CHECK(finish(engine.start(Operation::kFlush, file, 0, 0, 0, 0)).is_good());
                for (const auto &write : writes) CHECK(write->is_done() && write->outcome().is_good());
                CHECK(finish(start(engine, Operation::kRead, file, offset, target, part, 0, round % 4)).is_good());
                if (std::memcmp(source.address(), target.address(), part) != 0) std::exit(1);
            }
        });
    }
    for (auto &thread : threads) thread.join();
}

void test_one_ticket_many_waiters(EngineKind kind) {
    IoEngine engine(kind);
    const auto file = make_file(engine.add_drive({}), 1024 * kPage);
    AlignedMemory memory(1024 * kPage, false);
    const auto ticket = start(engine, Operation::kRead, file, 0, memory, 1024 * kPage);
    std::atomic<int> num_good{0};
    std::vector<std::thread> threads;
    for (int number = 0; number < 6; ++number)
        threads.emplace_back([&] { num_good += finish(ticket).is_good() ? 1 : 0; });
    for (auto &thread : threads) thread.join();
    CHECK(num_good == 6);
}

void test_results_are_judged(EngineKind kind) {
    IoEngine engine(kind);
    DriveSettings settings;
    settings.max_requests = 1;
    settings.block_bytes = 4 * kPage;
    const int drive = engine.add_drive(settings);
    auto &seam = engine.drive(drive);
    const auto file = make_file(drive, 16 * kPage);
    AlignedMemory source(16 * kPage, false), target(16 * kPage, false);
    fill(source, 3);
    CHECK(finish(start(engine, Operation::kWrite, file, 0, source, 16 * kPage)).is_good());

    // A short result is continued: from the last whole page if it ended inside one.
    for (const std::int64_t result : {std::int64_t{4096}, std::int64_t{8192}, std::int64_t{1}, std::int64_t{5000}}) {
        std::memset(target.address(), 0, 16 * kPage);
        seam.replace_result(2, result);
        CHECK(finish(start(engine, Operation::kRead, file, 0, target, 16 * kPage)).is_good());
        CHECK(std::memcmp(source.address(), target.address(), 16 * kPage) == 0);
    }
    CHECK(seam.counters().num_continued == 4);

    // Interruptions are repeated.
    for (const int error : {EINTR, EAGAIN}) {
        seam.replace_result(1, -error);
        seam.replace_result(2, -error);
        CHECK(finish(start(engine, Operation::kRead, file, 0, target, 16 * kPage)).is_good());
    }
    CHECK(seam.counters().num_retried == 4);

    // Anything else ends the request; what came before it is counted, what comes after is not tried.
    const auto before = seam.counters();
    seam.replace_result(2, -EIO);
    const auto failed = finish(start(engine, Operation::kRead, file, 0, target, 16 * kPage));
    CHECK(failed.error_number == EIO && !failed.is_short && failed.got_bytes == 4 * kPage);
    CHECK(seam.counters().num_blocks == before.num_blocks + 2);

    seam.replace_result(1, 0);
    const auto empty = finish(start(engine, Operation::kWrite, file, 0, source, 4 * kPage));
    CHECK(empty.is_short && empty.error_number == 0 && empty.got_bytes == 0);

    // More than asked cannot be true.
    seam.replace_result(1, 5 * static_cast<std::int64_t>(kPage));
    CHECK(finish(start(engine, Operation::kRead, file, 0, target, 4 * kPage)).error_number == EIO);

    // The end of the file, inside a page.
    CHECK(::ftruncate(file->descriptor(), 6 * kPage + 100) == 0);
    const auto short_read = finish(start(engine, Operation::kRead, file, 0, target, 16 * kPage));
    CHECK(short_read.is_short && short_read.got_bytes == 6 * kPage + 100);
    CHECK(finish(start(engine, Operation::kRead, file, 0, target, 6 * kPage)).is_good());
    const auto counters = seam.counters();
    CHECK(counters.num_started == counters.num_finished);
}

// The kernel's own refusals: a bad descriptor, a read-only one.
void test_kernel_errors(EngineKind kind) {
    IoEngine engine(kind);
    const int drive = engine.add_drive({});
    const int descriptor = ::open("/dev/full", O_WRONLY | O_CLOEXEC);
    CHECK(descriptor >= 0);
    const auto full = std::make_shared<File>("/dev/full", descriptor, drive, false);
    AlignedMemory memory(4 * kPage, true);
    CHECK(finish(start(engine, Operation::kWrite, full, 0, memory, 4 * kPage)).error_number == ENOSPC);
    CHECK(finish(start(engine, Operation::kRead, full, 0, memory, 4 * kPage)).error_number == EBADF);
}

void test_close_drains(EngineKind kind) {
    for (int round = 0; round < 10; ++round) {
        auto engine = std::make_unique<IoEngine>(kind);
        DriveSettings settings;
        settings.max_requests = 2;
        settings.block_bytes = kPage;
        const auto file = make_file(engine->add_drive(settings), 64 * kPage);
        AlignedMemory memory(64 * kPage, true);
        std::vector<std::shared_ptr<Ticket>> tickets;
        for (std::uint64_t page = 0; page < 64; page += 8)
            tickets.push_back(start(*engine, Operation::kWrite, file, page * kPage, memory, 8 * kPage, page * kPage));
        std::thread closer([&] { engine->close(); });
        engine->close();
        closer.join();
        for (const auto &ticket : tickets) CHECK(ticket->is_done() && ticket->outcome().is_good());
        bool was_refused = false;
        try {
            start(*engine, Operation::kRead, file, 0, memory, kPage);
        } catch (const EngineUnusable &) {
            was_refused = true;
        }
        CHECK(was_refused);
        engine.reset();
        for (const auto &ticket : tickets) CHECK(finish(ticket).is_good());
    }
}

// Starting races with closing: every request is either refused or carried out.
void test_start_races_with_close(EngineKind kind) {
    for (int round = 0; round < 20; ++round) {
        IoEngine engine(kind);
        const auto file = make_file(engine.add_drive({}), 8 * kPage);
        std::vector<std::thread> threads;
        for (int number = 0; number < 3; ++number) {
            threads.emplace_back([&] {
                AlignedMemory memory(kPage, true);
                try {
                    for (int count = 0; count < 200; ++count)
                        CHECK(finish(start(engine, Operation::kRead, file, 0, memory, kPage)).is_good());
                } catch (const EngineUnusable &) {
                }
            });
        }
        engine.close();
        for (auto &thread : threads) thread.join();
        const auto counters = engine.drive(0).counters();
        CHECK(counters.num_started == counters.num_finished);
    }
}

void test_queue() {
    DriveSettings settings;
    settings.max_requests = 2;
    settings.max_bytes = 100 * kPage;
    settings.block_bytes = 4 * kPage;
    DriveQueue queue(settings);
    CHECK(queue.is_idle() && !queue.next());
    queue.push(1, Operation::kWrite, 2, 8 * kPage);
    queue.push(2, Operation::kRead, 0, 4 * kPage);
    queue.push(3, Operation::kFlush, 0, 0);
    const auto first = queue.next(), second = queue.next();
    CHECK(first->request_id == 2 && second->request_id == 1 && second->nbytes == 4 * kPage);
    CHECK(!queue.next());
    queue.finished(*first);
    const auto third = queue.next();
    CHECK(third->request_id == 1 && third->start == 4 * kPage);
    queue.finished(*second);
    CHECK(!queue.next());  // the flush waits for the write's second block
    queue.finished(*third);
    const auto flush = queue.next();
    CHECK(flush->operation == Operation::kFlush);
    queue.finished(*flush);
    CHECK(queue.is_idle());
}

}  // namespace

int main(int count, char **arguments) {
    if (const char *wanted = std::getenv("TMPDIR")) directory = wanted;
    if (count > 1) directory = arguments[1];
    test_checksums();
    test_memory();
    test_queue();
    std::vector<EngineKind> kinds = {EngineKind::kThreads};
    const int refused = probe_uring();
    if (refused == 0)
        kinds.push_back(EngineKind::kUring);
    else
        std::printf("io_uring left out: %s\n", std::strerror(refused));
    for (const auto kind : kinds) {
        test_round_trip(kind);
        test_many_threads(kind, false);
        test_many_threads(kind, true);
        test_one_ticket_many_waiters(kind);
        test_results_are_judged(kind);
        test_kernel_errors(kind);
        test_close_drains(kind);
        test_start_races_with_close(kind);
    }
    std::printf("io_test: %d checks passed\n", num_checks.load());
    return 0;
}
