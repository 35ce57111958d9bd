// The control groups (v1 and v2) this process is in. Linux only.
// Source: cgroups(7), Documentation/admin-guide/cgroup-v2.rst of the kernel.
#pragma once

#include <string>
#include <vector>

namespace bmoe::os {

struct Cgroup {
    int version;       // 1 or 2
    std::string path;  // its directory
};

// The group of this process for a controller ("cpu", "memory"), and the groups it is inside of, innermost first.
std::vector<Cgroup> cgroups(const std::string &controller);

// First line of a small file, without its end; empty when it cannot be read.
std::string read_line(const std::string &path);

}  // namespace bmoe::os
