// The features of a CPU that a compiler may have been told to use: the macro by which it says so, a name, and where the
// CPU tells whether it has it: a word, a bit in it, and on x86 which registers the system must keep for it (XCR0).
#ifndef BMOE_LLAMA_CPU_FEATURES_H
#define BMOE_LLAMA_CPU_FEATURES_H

#if defined(__x86_64__) || defined(__i386__)
enum CpuWord { LEAF_1_ECX, LEAF_7_EBX, LEAF_7_ECX, LEAF_7_EDX, LEAF_7_1_EAX, LEAF_7_1_EDX, LEAF_EXT_ECX, N_CPU_WORDS };
enum KeptRegisters { KEPT_YMM = 0x6, KEPT_ZMM = 0xe6, KEPT_TILES = 0x60000 };
#define BMOE_CPU_FEATURES(X)                                             \
    X(__SSE3__, "SSE3", LEAF_1_ECX, 0, 0)                                \
    X(__SSSE3__, "SSSE3", LEAF_1_ECX, 9, 0)                              \
    X(__SSE4_1__, "SSE4.1", LEAF_1_ECX, 19, 0)                           \
    X(__SSE4_2__, "SSE4.2", LEAF_1_ECX, 20, 0)                           \
    X(__SSE4A__, "SSE4A", LEAF_EXT_ECX, 6, 0)                            \
    X(__POPCNT__, "POPCNT", LEAF_1_ECX, 23, 0)                           \
    X(__MOVBE__, "MOVBE", LEAF_1_ECX, 22, 0)                             \
    X(__LZCNT__, "LZCNT", LEAF_EXT_ECX, 5, 0)                            \
    X(__BMI__, "BMI1", LEAF_7_EBX, 3, 0)                                 \
    X(__BMI2__, "BMI2", LEAF_7_EBX, 8, 0)                                \
    X(__TBM__, "TBM", LEAF_EXT_ECX, 21, 0)                               \
    X(__ADX__, "ADX", LEAF_7_EBX, 19, 0)                                 \
    X(__AVX__, "AVX", LEAF_1_ECX, 28, KEPT_YMM)                          \
    X(__F16C__, "F16C", LEAF_1_ECX, 29, KEPT_YMM)                        \
    X(__FMA__, "FMA", LEAF_1_ECX, 12, KEPT_YMM)                          \
    X(__FMA4__, "FMA4", LEAF_EXT_ECX, 16, KEPT_YMM)                      \
    X(__XOP__, "XOP", LEAF_EXT_ECX, 11, KEPT_YMM)                        \
    X(__AVX2__, "AVX2", LEAF_7_EBX, 5, KEPT_YMM)                         \
    X(__GFNI__, "GFNI", LEAF_7_ECX, 8, 0)                                \
    X(__AVXVNNI__, "AVX-VNNI", LEAF_7_1_EAX, 4, KEPT_YMM)                \
    X(__AVXIFMA__, "AVX-IFMA", LEAF_7_1_EAX, 23, KEPT_YMM)               \
    X(__AVXVNNIINT8__, "AVX-VNNI-INT8", LEAF_7_1_EDX, 4, KEPT_YMM)       \
    X(__AVXNECONVERT__, "AVX-NE-CONVERT", LEAF_7_1_EDX, 5, KEPT_YMM)     \
    X(__AVX512F__, "AVX512F", LEAF_7_EBX, 16, KEPT_ZMM)                  \
    X(__AVX512DQ__, "AVX512DQ", LEAF_7_EBX, 17, KEPT_ZMM)                \
    X(__AVX512IFMA__, "AVX512-IFMA", LEAF_7_EBX, 21, KEPT_ZMM)           \
    X(__AVX512CD__, "AVX512CD", LEAF_7_EBX, 28, KEPT_ZMM)                \
    X(__AVX512BW__, "AVX512BW", LEAF_7_EBX, 30, KEPT_ZMM)                \
    X(__AVX512VL__, "AVX512VL", LEAF_7_EBX, 31, KEPT_ZMM)                \
    X(__AVX512VBMI__, "AVX512-VBMI", LEAF_7_ECX, 1, KEPT_ZMM)            \
    X(__AVX512VBMI2__, "AVX512-VBMI2", LEAF_7_ECX, 6, KEPT_ZMM)          \
    X(__AVX512VNNI__, "AVX512-VNNI", LEAF_7_ECX, 11, KEPT_ZMM)           \
    X(__AVX512BITALG__, "AVX512-BITALG", LEAF_7_ECX, 12, KEPT_ZMM)       \
    X(__AVX512VPOPCNTDQ__, "AVX512-VPOPCNTDQ", LEAF_7_ECX, 14, KEPT_ZMM) \
    X(__AVX512BF16__, "AVX512-BF16", LEAF_7_1_EAX, 5, KEPT_ZMM)          \
    X(__AVX512FP16__, "AVX512-FP16", LEAF_7_EDX, 23, KEPT_ZMM)           \
    X(__AMX_TILE__, "AMX-TILE", LEAF_7_EDX, 24, KEPT_TILES)              \
    X(__AMX_INT8__, "AMX-INT8", LEAF_7_EDX, 25, KEPT_TILES)              \
    X(__AMX_BF16__, "AMX-BF16", LEAF_7_EDX, 22, KEPT_TILES)
#elif defined(__aarch64__) && defined(__linux__)
enum CpuWord { HWCAP, HWCAP2, N_CPU_WORDS };  // of getauxval()
#define BMOE_CPU_FEATURES(X)                                      \
    X(__ARM_FEATURE_CRC32, "crc32", HWCAP, 7, 0)                  \
    X(__ARM_FEATURE_ATOMICS, "lse", HWCAP, 8, 0)                  \
    X(__ARM_FEATURE_QRDMX, "rdm", HWCAP, 12, 0)                   \
    X(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC, "fp16", HWCAP, 10, 0) \
    X(__ARM_FEATURE_DOTPROD, "dotprod", HWCAP, 20, 0)             \
    X(__ARM_FEATURE_SVE, "sve", HWCAP, 22, 0)                     \
    X(__ARM_FEATURE_SVE2, "sve2", HWCAP2, 1, 0)                   \
    X(__ARM_FEATURE_MATMUL_INT8, "i8mm", HWCAP2, 13, 0)           \
    X(__ARM_FEATURE_BF16, "bf16", HWCAP2, 14, 0)                  \
    X(__ARM_FEATURE_SME, "sme", HWCAP2, 23, 0)
#else
enum CpuWord { N_CPU_WORDS = 1 };
#define BMOE_CPU_FEATURES(X)
#endif

// The names of those that ggml-cpu was compiled for, each after a blank.
struct CpuFeatureNames {
    char text[512];
};
extern "C" const CpuFeatureNames bmoe_cpu_features;

#endif
