// needs: kernel_calls.cpp kernel_dispatch.cpp parallel_pieces.cpp kernels_portable.cpp kernels_avx2.cpp kernels_avx512.cpp
// Drives every kernel at awkward sizes, offsets and thread counts in exactly sized buffers, so that
// the sanitizers of scripts/sanitize see each load, store and thread. Values are compared between
// instruction sets and chunkings here; the judge of their meaning is optimizer/reference.py.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>

#include "lohan/kernels.hpp"

using namespace lohan;

namespace {

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);      \
            std::exit(1);                                                             \
        }                                                                             \
    } while (0)

// xorshift: the same numbers everywhere.
std::uint32_t random_bits() {
    static std::uint64_t state = 88172645463325252ull;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<std::uint32_t>(state >> 16);
}

// Ends where its memory ends: one element too far is seen by the address sanitizer.
template <class T>
class Exact {
   public:
    Exact(std::size_t count, std::size_t offset)
        : count_(count), offset_(offset), room_(new T[count + offset]()) {}
    T *begin() const { return room_.get() + offset_; }
    std::size_t count() const { return count_; }
    bool operator==(const Exact &other) const {
        return count_ == 0 || std::memcmp(begin(), other.begin(), count_ * sizeof(T)) == 0;
    }

   private:
    std::size_t count_, offset_;
    std::unique_ptr<T[]> room_;
};

// Results in the order they are made: one number for all platforms to agree on.
std::uint64_t checksum = 14695981039346656037ull;

template <class T>
void note(const Exact<T> &array) {
    unsigned char byte;
    for (std::size_t i = 0; i < array.count() * sizeof(T); ++i) {
        std::memcpy(&byte, reinterpret_cast<const char *>(array.begin()) + i, 1);
        checksum = (checksum ^ byte) * 1099511628211ull;
    }
}

void fill(const Exact<float> &array, bool is_positive) {
    for (std::size_t i = 0; i < array.count(); ++i) {
        std::uint32_t bits = random_bits();
        if (i % 7 != 0) bits = (bits & 0x80FFFFFFu) | 0x3E000000u;  // mostly ordinary numbers
        if (is_positive) bits &= 0x7FFFFFFFu;
        std::memcpy(array.begin() + i, &bits, sizeof bits);
    }
}

void fill(const Exact<std::uint16_t> &array) {
    for (std::size_t i = 0; i < array.count(); ++i)
        array.begin()[i] = static_cast<std::uint16_t>(random_bits());
}

template <class T>
void copy(const Exact<T> &from, const Exact<T> &to) {
    if (from.count()) std::memcpy(to.begin(), from.begin(), from.count() * sizeof(T));
}

// The set every processor of this architecture has.
std::string baseline() { return available_isas().back(); }

constexpr std::uint64_t expected_checksum = 0x96597dd1c611388dull;

const StepScalars scalars = {0.9f, 0.1f, 0.999f, 0.001f, 1e-8f, 0.5f};

std::vector<UpdateRange> ranges_of(std::size_t count) {
    return {{0, count / 3, 1e-3f, 1e-5f}, {count / 3, count / 3, 1.0f, 1.0f},
            {count / 2, count, 2e-3f, 0.0f}};
}

struct Split {
    Exact<std::uint16_t> p16, lo16;
    Exact<float> m32, v32;
    Split(std::size_t count, std::size_t offset)
        : p16(count, offset), lo16(count, offset), m32(count, offset), v32(count, offset) {}
    SplitState state() const { return {p16.begin(), lo16.begin(), m32.begin(), v32.begin()}; }
    bool operator==(const Split &other) const {
        return p16 == other.p16 && lo16 == other.lo16 && m32 == other.m32 && v32 == other.v32;
    }
};

void copy(const Split &from, const Split &to) {
    copy(from.p16, to.p16);
    copy(from.lo16, to.lo16);
    copy(from.m32, to.m32);
    copy(from.v32, to.v32);
}

void test_split_and_join(std::size_t count, unsigned num_threads) {
    Exact<float> masters(count, 1), joined(count, 3);
    Split split(count, 1);
    fill(masters, false);
    fill(split.v32, true);
    for (const std::string &isa : available_isas()) {
        split_masters(masters.begin(), split.state(), count, {num_threads, isa});
        join_masters(split.state(), joined.begin(), count, {num_threads, isa});
        CHECK(joined == masters);
    }
}

void test_updates_agree(std::size_t count, unsigned num_threads) {
    Exact<float> masters(count, 0), grad32(count, 1);
    Exact<std::uint16_t> grad16(count, 1);
    fill(masters, false);
    fill(grad32, false);
    fill(grad16);
    Split start(count, 0);
    fill(start.m32, false);
    fill(start.v32, true);
    split_masters(masters.begin(), start.state(), count, {1, baseline()});
    for (int format = 0; format < num_formats; ++format) {
        const void *grad = format == static_cast<int>(Format::fp32)
                               ? static_cast<const void *>(grad32.begin())
                               : grad16.begin();
        const auto as = static_cast<Format>(format);
        Split expected(count, 0);
        copy(start, expected);
        adamw_split(grad, as, expected.state(), count, ranges_of(count), scalars, {1, baseline()});
        note(expected.p16);
        note(expected.lo16);
        note(expected.m32);
        note(expected.v32);
        for (const std::string &isa : available_isas()) {
            Split got(count, 5);
            copy(start, got);
            adamw_split(grad, as, got.state(), count, ranges_of(count), scalars,
                        {num_threads, isa});
            CHECK(got == expected);
        }
        for (int compute = 0; compute < num_computes; ++compute) {
            Exact<float> p_one(count, 0), p_many(count, 2);
            Exact<float> m_one(count, 0), m_many(count, 1), v_one(count, 0), v_many(count, 7);
            Exact<std::uint16_t> p16_one(count, 0), p16_many(count, 9);
            for (const auto *p : {&p_one, &p_many}) copy(masters, *p);
            for (const auto *m : {&m_one, &m_many}) copy(start.m32, *m);
            const bool has_p16 = compute != 0;
            adamw_plain(grad, as,
                        {p_one.begin(), m_one.begin(), v_one.begin(),
                         has_p16 ? p16_one.begin() : nullptr},
                        static_cast<Compute>(compute), count, ranges_of(count), scalars,
                        {1, baseline()});
            adamw_plain(grad, as,
                        {p_many.begin(), m_many.begin(), v_many.begin(),
                         has_p16 ? p16_many.begin() : nullptr},
                        static_cast<Compute>(compute), count, ranges_of(count), scalars,
                        {num_threads, ""});
            note(p_one);
            note(p16_one);
            CHECK(p_one == p_many && m_one == m_many && v_one == v_many && p16_one == p16_many);
        }
    }
}

void test_sums_agree(std::size_t count, unsigned num_threads) {
    const std::size_t num_leaves = (count + leaf_elements - 1) / leaf_elements;
    Exact<float> grad(count, 1);
    fill(grad, false);
    Exact<double> one(num_leaves, 0), many(num_leaves, 1);
    const auto expected =
        sum_of_squares(grad.begin(), Format::fp32, count, one.begin(), {1, baseline()});
    for (const std::string &isa : available_isas()) {
        const auto num_nonfinite = sum_of_squares(grad.begin(), Format::fp32, count, many.begin(),
                                                  {num_threads, isa});
        CHECK(num_nonfinite == expected);
        CHECK(one == many);
    }
    note(one);
    const double total = combined_leaf_sums(one.begin(), num_leaves);
    CHECK(count != 0 || total == 0.0);
}

void test_conversions(std::size_t count, unsigned num_threads) {
    Exact<float> wide(count, 1), back(count, 0);
    Exact<std::uint16_t> narrow(count, 3), again(count, 1);
    fill(wide, false);
    for (const std::string &isa : available_isas()) {
        for (const Format format : {Format::bf16, Format::fp16}) {
            const CallOptions options = {num_threads, isa};
            convert(wide.begin(), Format::fp32, narrow.begin(), format, count, options);
            convert(narrow.begin(), format, back.begin(), Format::fp32, count, options);
            convert(back.begin(), Format::fp32, again.begin(), format, count, options);
            CHECK(narrow == again);
            if (isa == baseline()) note(narrow);
        }
    }
}

void test_streaming_twice_restores(std::size_t count, unsigned num_threads) {
    Exact<std::uint16_t> grad(count, 0);
    fill(grad);
    Split start(count, 0), split(count, 0);
    fill(start.p16);
    fill(start.lo16);
    fill(start.m32, false);
    fill(start.v32, true);
    copy(start, split);
    for (int turn = 0; turn < 2; ++turn) {
        CHECK(count == 0 || turn == 0 || !(split == start));
        stream_split(grad.begin(), split.state(), count, {num_threads, ""});
    }
    CHECK(split == start);
}

template <class Call>
void check_refused(const Call &call) {
    try {
        call();
    } catch (const std::invalid_argument &) {
        return;
    }
    CHECK(!"refused");
}

void test_bad_arguments_are_refused() {
    Split split(8, 0);
    Exact<float> p32(8, 0), grad(8, 0);
    const SplitState good = split.state();
    const auto update = [&](const SplitState &state, std::vector<UpdateRange> ranges,
                            CallOptions options) {
        adamw_split(grad.begin(), Format::fp32, state, 8, ranges, scalars, options);
    };
    const UpdateRange whole = {0, 8, 0.1f, 0.0f};
    check_refused([&] { update(good, {whole}, {0, ""}); });
    check_refused([&] { update(good, {whole}, {1, "mmx"}); });
    check_refused([&] { update(good, {{0, 9, 0.1f, 0.0f}}, {1, ""}); });
    check_refused([&] { update(good, {whole, whole}, {1, ""}); });
    SplitState overlapping = good;
    overlapping.m32 = good.v32;
    check_refused([&] { update(overlapping, {whole}, {1, ""}); });
    SplitState absent = good;
    absent.p16 = nullptr;
    check_refused([&] { update(absent, {whole}, {1, ""}); });
    check_refused([&] {
        convert(grad.begin(), Format::fp32, p32.begin(), Format::fp32, 8, {1, ""});
    });
    for (const std::string &isa : compiled_isas()) {
        bool is_available = false;
        for (const std::string &one : available_isas()) is_available |= one == isa;
        if (!is_available) check_refused([&] { update(good, {whole}, {1, isa}); });
    }
}

// Several callers at once, each with threads of its own.
void test_concurrent_callers() {
    constexpr std::size_t count = 200001;
    Split together(count, 0), apart(count, 0);
    Exact<std::uint16_t> grad(count, 0);
    fill(grad);
    copy(together, apart);
    adamw_split(grad.begin(), Format::bf16, together.state(), count, {{0, count, 0.1f, 0.0f}},
                scalars, {1, ""});
    std::vector<std::thread> callers;
    for (std::size_t begin = 0; begin < count; begin += 66667) {
        const std::size_t length = std::min<std::size_t>(66667, count - begin);
        callers.emplace_back([&, begin, length] {
            const SplitState all = apart.state();
            const SplitState part = {all.p16 + begin, all.lo16 + begin, all.m32 + begin,
                                     all.v32 + begin};
            adamw_split(grad.begin() + begin, Format::bf16, part, length,
                        {{0, length, 0.1f, 0.0f}}, scalars, {3, ""});
        });
    }
    for (std::thread &caller : callers) caller.join();
    CHECK(together == apart);
}

}  // namespace

int main() {
    for (const std::size_t count : {0u, 1u, 3u, 15u, 16u, 17u, 63u, 1023u, 1025u, 4097u, 150001u}) {
        const unsigned num_threads = count > 100000 ? 4 : 2;
        test_split_and_join(count, num_threads);
        test_updates_agree(count, num_threads);
        test_sums_agree(count, num_threads);
        test_conversions(count, num_threads);
        test_streaming_twice_restores(count, num_threads);
    }
    test_bad_arguments_are_refused();
    test_concurrent_callers();
    // Little-endian x86-64 and aarch64, gcc and clang, every instruction set: the same results.
    std::printf("kernels_test: checksum %016llx\n", static_cast<unsigned long long>(checksum));
    CHECK(checksum == expected_checksum);
    std::puts("kernels_test: ok");
    return 0;
}
