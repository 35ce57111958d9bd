// Whether this CPU has what the library was compiled for: asked before any code of ggml-cpu runs, which would end the
// process with SIGILL. Compiled, like all of csrc, for any CPU of its kind.
#pragma once

#include <cstdint>
#include <string>

#include "cmake/llama/cpu_features.h"

namespace bmoe::os {

// What a CPU says that it has, and the system that it keeps.
struct Cpu {
    uint32_t words[N_CPU_WORDS];
    uint64_t kept_registers;
};
Cpu this_cpu();

// Those of the names, each after a blank, that the CPU lacks: "AVX2, FMA".
std::string missing_features(const char *names, const Cpu &cpu);

// Throws Error (BMOE_E_UNSUPPORTED).
void require_cpu();

}  // namespace bmoe::os
