// What this process may use of the machine's processors and time.
#pragma once

#include <cstdint>

namespace bmoe::os {

// CPUs that this process may run on at once: its affinity, and the quota of its cgroups rounded up. At least 1.
int32_t usable_cpus();

struct Usage {
    double cpu_s;            // user + system of all threads of the process
    int64_t n_major_faults;  // page faults that had to read
};
Usage process_usage();

// Whether n threads can be started now, found by starting them.
bool can_start_threads(int32_t n);

}  // namespace bmoe::os
