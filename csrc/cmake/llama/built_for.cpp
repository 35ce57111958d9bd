// Compiled as a part of ggml-cpu, with its flags: what they let the compiler use. Data and no code, so that any CPU can
// read it.
#include "cpu_features.h"

#define BMOE_TEXT(...) #__VA_ARGS__
// A macro that is defined no longer reads as its own name.
#define BMOE_NAME_IF_USED(macro, name, ...) (BMOE_TEXT(macro)[0] == '_' ? "" : " " name),

static constexpr CpuFeatureNames used_names() {
    constexpr const char *names[] = {BMOE_CPU_FEATURES(BMOE_NAME_IF_USED) ""};
    CpuFeatureNames used{};
    unsigned n = 0;
    for (const char *name : names)
        for (; *name; ++name) used.text[n++] = *name;
    return used;
}

constexpr CpuFeatureNames bmoe_cpu_features = used_names();
