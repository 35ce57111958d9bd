#include "os/memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#if defined(__linux__)
#include "os/cgroup.h"
#endif

namespace bmoe::os {

#if defined(__linux__)
// The number after a key in a file of "key value" lines, or 0.
static int64_t value_of(const std::string &path, const std::string &key) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        if (line.compare(0, key.size(), key) == 0) return std::atoll(line.c_str() + key.size());
    }
    return 0;
}

// What a group leaves: its limit less its usage, page cache not counted since the kernel gives that back.
// -1: no limit.
static int64_t left_in(const Cgroup &group) {
    const bool v2 = group.version == 2;
    const std::string limit_text = read_line(group.path + (v2 ? "/memory.max" : "/memory.limit_in_bytes"));
    if (limit_text.empty() || limit_text == "max") return -1;
    const int64_t limit = std::atoll(limit_text.c_str());
    if (limit <= 0 || limit >= (int64_t{1} << 60)) return -1;  // v1 writes "no limit" as a huge number
    const int64_t usage =
        std::atoll(read_line(group.path + (v2 ? "/memory.current" : "/memory.usage_in_bytes")).c_str());
    const int64_t cached = value_of(group.path + "/memory.stat", v2 ? "inactive_file " : "total_inactive_file ") +
                           value_of(group.path + "/memory.stat", v2 ? "active_file " : "total_active_file ");
    return std::max<int64_t>(limit - std::max<int64_t>(usage - cached, 0), 0);
}
#endif

int64_t available_bytes() {
#if defined(__linux__)
    int64_t bytes = 1024 * value_of("/proc/meminfo", "MemAvailable:");
    for (const Cgroup &group : cgroups("memory")) {
        const int64_t left = left_in(group);
        if (left >= 0) bytes = bytes > 0 ? std::min(bytes, left) : left;
    }
    return bytes;
#else
    const long pages = sysconf(_SC_PHYS_PAGES);
    return pages > 0 ? static_cast<int64_t>(pages) * sysconf(_SC_PAGESIZE) : 0;
#endif
}

}  // namespace bmoe::os
