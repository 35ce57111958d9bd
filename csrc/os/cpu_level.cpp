#include "os/cpu_level.h"

#include <cstring>

#include "error.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace bmoe::os {

namespace {

struct Feature {
    const char *name;
    CpuWord word;
    int bit;
    uint64_t registers;
};
#define BMOE_FEATURE(macro, name, word, bit, registers) {name, word, bit, registers},
constexpr Feature FEATURES[] = {BMOE_CPU_FEATURES(BMOE_FEATURE){"", CpuWord{}, 0, 0}};
#undef BMOE_FEATURE

const Feature *find_feature(const std::string &name) {
    for (const Feature &feature : FEATURES)
        if (name == feature.name) return &feature;
    return nullptr;
}

}  // namespace

#if defined(__x86_64__) || defined(__i386__)
Cpu this_cpu() {
    Cpu cpu{};
    uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx)) {
        cpu.words[LEAF_1_ECX] = ecx;
        if (ecx & bit_OSXSAVE) {
            uint32_t low = 0, high = 0;
            __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
            cpu.kept_registers = low | uint64_t{high} << 32;
        }
    }
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
        cpu.words[LEAF_7_EBX] = ebx;
        cpu.words[LEAF_7_ECX] = ecx;
        cpu.words[LEAF_7_EDX] = edx;
        if (eax >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) {
            cpu.words[LEAF_7_1_EAX] = eax;
            cpu.words[LEAF_7_1_EDX] = edx;
        }
    }
    if (__get_cpuid(0x80000001, &eax, &ebx, &ecx, &edx)) cpu.words[LEAF_EXT_ECX] = ecx;
    return cpu;
}
#elif defined(__aarch64__) && defined(__linux__)
Cpu this_cpu() {
    Cpu cpu{};
    cpu.words[HWCAP] = static_cast<uint32_t>(getauxval(AT_HWCAP));
    cpu.words[HWCAP2] = static_cast<uint32_t>(getauxval(AT_HWCAP2));
    return cpu;
}
#else
Cpu this_cpu() { return {}; }
#endif

std::string missing_features(const char *names, const Cpu &cpu) {
    std::string missing;
    for (const char *at = names; *at;) {
        at += strspn(at, " ");
        const std::string name(at, strcspn(at, " "));
        at += name.size();
        const Feature *feature = find_feature(name);
        const bool has = feature && (cpu.words[feature->word] >> feature->bit & 1);
        const bool kept = has && (cpu.kept_registers & feature->registers) == feature->registers;
        if (kept) continue;
        missing += (missing.empty() ? "" : ", ") + name + (has ? " (which the system does not switch on)" : "");
    }
    return missing;
}

void require_cpu() {
    static const std::string missing = missing_features(bmoe_cpu_features.text, this_cpu());
    if (missing.empty()) return;
    fail(BMOE_E_UNSUPPORTED,
         "this CPU lacks what this build of bmoe needs: %s; built on this machine from its source bmoe takes what is "
         "there",
         missing.c_str());
}

}  // namespace bmoe::os
