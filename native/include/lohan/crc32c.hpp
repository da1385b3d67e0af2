// CRC-32C (Castagnoli), the checksum of iSCSI (RFC 3720, appendix B.4), ext4 and NVMe.
// The same number on every processor: instructions of SSE4.2 or ARMv8 where present, else tables.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lohan {

// Checksum of the bytes so far (`before`, 0 at the start) followed by these.
std::uint32_t crc32c(std::uint32_t before, const void *bytes, std::size_t nbytes);
// The judge of the fast path, and the fallback.
std::uint32_t crc32c_portable(std::uint32_t before, const void *bytes, std::size_t nbytes);
// Checksum of A followed by B, from the checksums of A and of B and the length of B.
std::uint32_t crc32c_join(std::uint32_t first, std::uint32_t second, std::uint64_t second_nbytes);
// "sse4.2", "armv8-crc" or "tables".
const char *crc32c_path();

}  // namespace lohan
