// See crc32c.hpp. Bits are in reflected order: bit 31 of a word is the coefficient of x^0.
//
// The instruction takes 3 cycles but a new one can start every cycle, so three stretches of the input
// run side by side; their checksums are joined by advancing the first over the length of the rest,
// which is linear and done by a table of 4 x 256 words per length.
#include "lohan/crc32c.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif
#endif

namespace lohan {

namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78u;  // 0x1edc6f41 reflected
constexpr std::size_t kStretchBytes = 4096;

using Table = std::array<std::array<std::uint32_t, 256>, 8>;

// tables[k][byte]: effect of a byte that is followed by k more bytes of zeros.
constexpr Table make_tables() {
    Table tables{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t value = byte;
        for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) ? kPolynomial : 0);
        tables[0][byte] = value;
    }
    for (std::size_t k = 1; k < 8; ++k)
        for (std::size_t byte = 0; byte < 256; ++byte)
            tables[k][byte] = (tables[k - 1][byte] >> 8) ^ tables[0][tables[k - 1][byte] & 0xff];
    return tables;
}

constexpr Table kTables = make_tables();

// Product of two polynomials modulo the Castagnoli polynomial.
constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
    std::uint32_t product = 0;
    for (std::uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
        if (a & bit) product ^= b;
        b = (b >> 1) ^ ((b & 1) ? kPolynomial : 0);
    }
    return product;
}

// x^(8 * nbytes): multiplying by it advances a checksum over that many zero bytes.
constexpr std::uint32_t power_of_bytes(std::uint64_t nbytes) {
    std::uint32_t result = 0x80000000u;  // 1
    std::uint32_t square = 0x00800000u;  // x^8
    for (; nbytes != 0; nbytes >>= 1) {
        if (nbytes & 1) result = multiply(result, square);
        square = multiply(square, square);
    }
    return result;
}

std::uint64_t load64(const unsigned char *bytes) {
    std::uint64_t word;
    std::memcpy(&word, bytes, sizeof word);
    return word;
}

#if defined(__x86_64__) || defined(__aarch64__)

using Advance = std::array<std::array<std::uint32_t, 256>, 4>;

constexpr Advance make_advance(std::uint64_t nbytes) {
    Advance table{};
    const auto power = power_of_bytes(nbytes);
    for (std::size_t place = 0; place < 4; ++place)
        for (std::uint32_t byte = 0; byte < 256; ++byte)
            table[place][byte] = multiply(byte << (8 * place), power);
    return table;
}

const Advance &advance_over_stretch() {
    static const Advance table = make_advance(kStretchBytes);
    return table;
}

std::uint32_t advance(const Advance &table, std::uint32_t value) {
    return table[0][value & 0xff] ^ table[1][(value >> 8) & 0xff] ^ table[2][(value >> 16) & 0xff] ^
           table[3][value >> 24];
}

#if defined(__x86_64__)
#define LOHAN_CRC_TARGET __attribute__((target("sse4.2")))
LOHAN_CRC_TARGET inline std::uint32_t step64(std::uint32_t value, std::uint64_t word) {
    return static_cast<std::uint32_t>(_mm_crc32_u64(value, word));
}
LOHAN_CRC_TARGET inline std::uint32_t step8(std::uint32_t value, unsigned char byte) {
    return _mm_crc32_u8(value, byte);
}
bool has_instruction() { return __builtin_cpu_supports("sse4.2"); }
constexpr const char *kInstructionName = "sse4.2";
#else
#if defined(__clang__)
#define LOHAN_CRC_TARGET __attribute__((target("crc")))
#define LOHAN_CRC_WORD __builtin_arm_crc32cd
#define LOHAN_CRC_BYTE __builtin_arm_crc32cb
#else
#define LOHAN_CRC_TARGET __attribute__((target("+crc")))
#define LOHAN_CRC_WORD __builtin_aarch64_crc32cx
#define LOHAN_CRC_BYTE __builtin_aarch64_crc32cb
#endif
LOHAN_CRC_TARGET inline std::uint32_t step64(std::uint32_t value, std::uint64_t word) {
    return LOHAN_CRC_WORD(value, word);
}
LOHAN_CRC_TARGET inline std::uint32_t step8(std::uint32_t value, unsigned char byte) {
    return LOHAN_CRC_BYTE(value, byte);
}
bool has_instruction() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
constexpr const char *kInstructionName = "armv8-crc";
#endif

LOHAN_CRC_TARGET std::uint32_t crc32c_instruction(std::uint32_t before, const void *bytes, std::size_t nbytes) {
    auto value = ~before;
    const auto *next = static_cast<const unsigned char *>(bytes);
    const Advance &table = advance_over_stretch();
    while (nbytes >= 3 * kStretchBytes) {
        std::uint32_t second = 0, third = 0;
        for (std::size_t byte = 0; byte < kStretchBytes; byte += 8) {
            value = step64(value, load64(next + byte));
            second = step64(second, load64(next + kStretchBytes + byte));
            third = step64(third, load64(next + 2 * kStretchBytes + byte));
        }
        value = advance(table, advance(table, value) ^ second) ^ third;
        next += 3 * kStretchBytes;
        nbytes -= 3 * kStretchBytes;
    }
    for (; nbytes >= 8; next += 8, nbytes -= 8) value = step64(value, load64(next));
    for (; nbytes > 0; ++next, --nbytes) value = step8(value, *next);
    return ~value;
}

#endif

}  // namespace

std::uint32_t crc32c_portable(std::uint32_t before, const void *bytes, std::size_t nbytes) {
    auto value = ~before;
    const auto *next = static_cast<const unsigned char *>(bytes);
#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    for (; nbytes >= 8; next += 8, nbytes -= 8) {
        const auto word = load64(next) ^ value;
        value = 0;
        for (std::size_t place = 0; place < 8; ++place) value ^= kTables[7 - place][(word >> (8 * place)) & 0xff];
    }
#endif
    for (; nbytes > 0; ++next, --nbytes) value = (value >> 8) ^ kTables[0][(value ^ *next) & 0xff];
    return ~value;
}

std::uint32_t crc32c(std::uint32_t before, const void *bytes, std::size_t nbytes) {
#if defined(__x86_64__) || defined(__aarch64__)
    static const bool is_fast = has_instruction();
    if (is_fast) return crc32c_instruction(before, bytes, nbytes);
#endif
    return crc32c_portable(before, bytes, nbytes);
}

std::uint32_t crc32c_join(std::uint32_t first, std::uint32_t second, std::uint64_t second_nbytes) {
    return multiply(first, power_of_bytes(second_nbytes)) ^ second;
}

const char *crc32c_path() {
#if defined(__x86_64__) || defined(__aarch64__)
    if (has_instruction()) return kInstructionName;
#endif
    return "tables";
}

}  // namespace lohan
