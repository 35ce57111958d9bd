#include "os/cpu.h"

#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

#if defined(__linux__)
#include <sched.h>

#include "os/cgroup.h"
#endif
#include <exception>
#include <mutex>
#include <vector>

namespace bmoe::os {

#if defined(__linux__)
// CPUs' worth of time one cgroup grants, or 0 for no limit.
static double quota_of(const Cgroup &group) {
    if (group.version == 2) {
        std::istringstream line(read_line(group.path + "/cpu.max"));
        std::string quota;
        double period = 0;
        line >> quota >> period;
        return quota.empty() || quota == "max" || period <= 0 ? 0 : std::atof(quota.c_str()) / period;
    }
    const double quota = std::atof(read_line(group.path + "/cpu.cfs_quota_us").c_str());
    const double period = std::atof(read_line(group.path + "/cpu.cfs_period_us").c_str());
    return quota > 0 && period > 0 ? quota / period : 0;
}
#endif

int32_t usable_cpus() {
    int32_t cpus = static_cast<int32_t>(std::thread::hardware_concurrency());
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) cpus = CPU_COUNT(&set);
    for (const Cgroup &group : cgroups("cpu")) {
        const double quota = quota_of(group);
        if (quota > 0) cpus = std::min(cpus, static_cast<int32_t>(std::ceil(quota)));
    }
#endif
    return std::max(cpus, 1);
}

Usage process_usage() {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    const auto seconds = [](const timeval &t) {
        return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
    };
    return {seconds(usage.ru_utime) + seconds(usage.ru_stime), static_cast<int64_t>(usage.ru_majflt)};
}

bool can_start_threads(int32_t n) {
    std::vector<std::thread> threads;
    threads.reserve(static_cast<size_t>(n));
    std::mutex gate;
    bool all = true;
    {
        const std::lock_guard<std::mutex> closed(gate);  // none ends before the last one has started
        try {
            for (int32_t i = 0; i < n; ++i) threads.emplace_back([&] { const std::lock_guard<std::mutex> pass(gate); });
        } catch (const std::exception &) {
            all = false;
        }
    }
    for (std::thread &thread : threads) thread.join();
    return all;
}

}  // namespace bmoe::os
