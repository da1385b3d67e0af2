// See aligned_memory.hpp.
#include "lohan/aligned_memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

namespace lohan {

namespace {

constexpr std::uint64_t kHugePageBytes = 2u << 20;

// 4096 on most machines, more on some; both are multiples of what direct I/O needs.
std::uint64_t page_bytes() { return static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)); }

std::uint64_t round_up(std::uint64_t value, std::uint64_t step) { return (value + step - 1) / step * step; }

// Maps `nbytes` at a multiple of `alignment`: maps more, then gives the ends back.
void *map_aligned(std::uint64_t nbytes, std::uint64_t alignment) {
    const auto mapped = nbytes + alignment;
    void *start = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
    const auto begin = reinterpret_cast<std::uintptr_t>(start);
    const auto first = round_up(begin, alignment);
    if (first > begin) ::munmap(start, first - begin);
    const auto end = begin + mapped;
    if (first + nbytes < end) ::munmap(reinterpret_cast<void *>(first + nbytes), end - first - nbytes);
    return reinterpret_cast<void *>(first);
}

int populate(void *address, std::uint64_t nbytes) {
#ifdef MADV_POPULATE_WRITE
    if (::madvise(address, nbytes, MADV_POPULATE_WRITE) == 0) return 0;
    if (errno != EINVAL && errno != ENOSYS) return errno;
#endif
    for (std::uint64_t byte = 0; byte < nbytes; byte += page_bytes())
        static_cast<volatile char *>(address)[byte] = 0;
    return 0;
}

}  // namespace

AlignedMemory::AlignedMemory(std::uint64_t nbytes, bool should_populate)
    : nbytes_(nbytes), mapped_bytes_(round_up(nbytes, page_bytes())), process_id_(::getpid()) {
    // Near 2^64 the rounding above wraps around: such a size must not become a small mapping.
    if (nbytes == 0 || nbytes > static_cast<std::uint64_t>(PTRDIFF_MAX))
        throw std::system_error(nbytes == 0 ? EINVAL : ENOMEM, std::generic_category(), "mmap");
    // Huge pages make direct I/O cheaper: the kernel looks up and pins one page where it would pin 512.
    const bool is_huge = mapped_bytes_ >= kHugePageBytes;
    address_ = map_aligned(mapped_bytes_, is_huge ? kHugePageBytes : page_bytes());
    if (is_huge) ::madvise(address_, mapped_bytes_, MADV_HUGEPAGE);
    // A fork while the drive writes into private memory could leave the bytes in the wrong process
    // (open(2), O_DIRECT): children do not get this memory at all.
    ::madvise(address_, mapped_bytes_, MADV_DONTFORK);
    if (should_populate) {
        const int error = populate(address_, mapped_bytes_);
        if (error != 0) {
            ::munmap(address_, mapped_bytes_);
            throw std::system_error(error, std::generic_category(), "populating memory");
        }
    }
}

AlignedMemory::~AlignedMemory() {
    // In a forked child these addresses were never mapped, and may be somebody else's by now.
    if (::getpid() == process_id_) ::munmap(address_, mapped_bytes_);
}

}  // namespace lohan
