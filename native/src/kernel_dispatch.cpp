// Which compilations of kernels.inc this processor can run. Compiled for the baseline.
#include <stdexcept>

#include "lohan/kernels.hpp"

namespace lohan {

#if defined(__aarch64__)
namespace neon {
extern const KernelTable table;
}
#else
namespace portable {
extern const KernelTable table;
}
#endif
#if defined(__x86_64__)
namespace avx2 {
extern const KernelTable table;
}
namespace avx512 {
extern const KernelTable table;
}
#endif

namespace {

struct Compiled {
    const KernelTable *table;
    bool is_available;
};

// Best first. The compiler's test also asks whether the operating system saves the registers.
std::vector<Compiled> all_compiled() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx512 = __builtin_cpu_supports("avx512f") &&
                            __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512vl");
    return {{&avx512::table, has_avx512},
            {&avx2::table, __builtin_cpu_supports("avx2") != 0},
            {&portable::table, true}};
#elif defined(__aarch64__)
    return {{&neon::table, true}};
#else
    return {{&portable::table, true}};
#endif
}

const std::vector<Compiled> &compiled() {
    static const std::vector<Compiled> once = all_compiled();
    return once;
}

}  // namespace

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const Compiled &one : compiled())
        if (one.is_available) names.emplace_back(one.table->isa);
    return names;
}

std::vector<std::string> compiled_isas() {
    std::vector<std::string> names;
    for (const Compiled &one : compiled()) names.emplace_back(one.table->isa);
    return names;
}

const KernelTable &kernels_of(const std::string &isa) {
    std::string known;
    for (const Compiled &one : compiled()) {
        if (!one.is_available) continue;
        if (isa.empty() || isa == one.table->isa) return *one.table;
        known += known.empty() ? one.table->isa : std::string(", ") + one.table->isa;
    }
    throw std::invalid_argument("instruction set '" + isa +
                                "' is not available here; available: " + known);
}

}  // namespace lohan
