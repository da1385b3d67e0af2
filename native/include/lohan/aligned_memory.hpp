// Host memory for direct I/O: aligned, of exactly the size asked (to the page), straight from the system.
// Nothing is rounded to a power of two. Later it can be pinned by address and size.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace lohan {

class AlignedMemory {
   public:
    // Throws std::system_error (ENOMEM). With `should_populate` the pages exist when it returns, so that a
    // machine short of memory says so now and not at the first touch.
    AlignedMemory(std::uint64_t nbytes, bool should_populate);
    ~AlignedMemory();
    AlignedMemory(const AlignedMemory &) = delete;
    AlignedMemory &operator=(const AlignedMemory &) = delete;

    void *address() const { return address_; }
    std::uint64_t nbytes() const { return nbytes_; }
    // What the system gave: `nbytes` rounded up to whole pages.
    std::uint64_t mapped_bytes() const { return mapped_bytes_; }

   private:
    void *address_ = nullptr;
    std::uint64_t nbytes_;
    std::uint64_t mapped_bytes_;
    pid_t process_id_;
};

}  // namespace lohan
