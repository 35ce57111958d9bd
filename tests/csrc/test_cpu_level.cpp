// What a CPU lacks, of CPUs that are made up, and of this one: prints what is wrong, and nothing where nothing is.
#include <cstdio>
#include <string>

#include "error.h"
#include "ggml-cpu.h"
#include "os/cpu_level.h"

namespace {

void expect(const std::string &found, const std::string &wanted, const char *what) {
    if (found != wanted) printf("wrong: %s: \"%s\", not \"%s\"\n", what, found.c_str(), wanted.c_str());
}

void expect_used(const std::string &name, int of_ggml) {
    const std::string all = std::string(bmoe_cpu_features.text) + " ";
    const bool named = all.find(" " + name + " ") != std::string::npos;
    if (named != (of_ggml != 0)) printf("wrong: %s is %s\n", name.c_str(), named ? "named, not used" : "not named");
}

void set(bmoe::os::Cpu &cpu, CpuWord word, int bit) { cpu.words[word] |= uint32_t{1} << bit; }

}  // namespace

int main() {
    using bmoe::os::Cpu, bmoe::os::missing_features;
    bmoe::os::require_cpu();
    expect(missing_features("", Cpu{}), "", "nothing is asked for");
    expect(missing_features(" no-such-thing", bmoe::os::this_cpu()), "no-such-thing", "what nobody can check");
#if defined(__x86_64__)
    expect(missing_features(" SSE4.2 AVX2 LZCNT", Cpu{}), "SSE4.2, AVX2, LZCNT", "a CPU with nothing");
    Cpu haswell{};
    set(haswell, LEAF_1_ECX, 20);
    set(haswell, LEAF_1_ECX, 28);
    set(haswell, LEAF_7_EBX, 5);
    haswell.kept_registers = 0x7;
    expect(missing_features(" SSE4.2 AVX AVX2", haswell), "", "a CPU with all of it");
    expect(missing_features(" AVX2 AVX512F AVX512-BF16 AMX-INT8", haswell), "AVX512F, AVX512-BF16, AMX-INT8",
           "a CPU with half of it");
    set(haswell, LEAF_7_EBX, 16);
    expect(missing_features(" AVX2 AVX512F", haswell), "AVX512F (which the system does not switch on)",
           "registers that are not kept");
    haswell.kept_registers = 0xe7;
    expect(missing_features(" AVX2 AVX512F", haswell), "", "registers that are kept");
    haswell.kept_registers = 0;
    expect(missing_features(" SSE4.2 AVX", haswell), "AVX (which the system does not switch on)", "none are kept");

    expect_used("SSE3", ggml_cpu_has_sse3());
    expect_used("SSSE3", ggml_cpu_has_ssse3());
    expect_used("AVX", ggml_cpu_has_avx());
    expect_used("AVX-VNNI", ggml_cpu_has_avx_vnni());
    expect_used("AVX2", ggml_cpu_has_avx2());
    expect_used("BMI2", ggml_cpu_has_bmi2());
    expect_used("F16C", ggml_cpu_has_f16c());
    expect_used("FMA", ggml_cpu_has_fma());
    expect_used("AVX512F", ggml_cpu_has_avx512());
    expect_used("AVX512-VBMI", ggml_cpu_has_avx512_vbmi());
    expect_used("AVX512-VNNI", ggml_cpu_has_avx512_vnni());
    expect_used("AVX512-BF16", ggml_cpu_has_avx512_bf16());
    expect_used("AMX-INT8", ggml_cpu_has_amx_int8());
#endif
    return 0;
}
