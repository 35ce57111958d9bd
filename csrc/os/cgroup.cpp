#include "os/cgroup.h"

#include <fstream>
#include <sstream>

namespace bmoe::os {

std::string read_line(const std::string &path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

// Whether a comma-separated list has the item.
static bool lists(const std::string &list, const std::string &item) {
    std::istringstream stream(list);
    for (std::string part; std::getline(stream, part, ',');) {
        if (part == item) return true;
    }
    return false;
}

struct Mount {
    std::string point;
    std::string root;  // which part of the hierarchy is mounted there: a container sees its own group as "/"
};

// Where the hierarchy of a controller is mounted, from /proc/self/mountinfo; an empty point when it is not.
static Mount mount_of(const std::string &controller, int version) {
    std::ifstream file("/proc/self/mountinfo");
    for (std::string line; std::getline(file, line);) {
        std::istringstream fields(line);
        std::string id, parent, device, root, point, word, type, source, options;
        fields >> id >> parent >> device >> root >> point;
        while (fields >> word && word != "-") {
        }
        fields >> type >> source >> options;
        if (version == 2 ? type == "cgroup2" : type == "cgroup" && lists(options, controller)) return {point, root};
    }
    return {};
}

std::vector<Cgroup> cgroups(const std::string &controller) {
    std::vector<Cgroup> found;
    std::ifstream file("/proc/self/cgroup");
    for (std::string line; std::getline(file, line);) {
        const size_t first = line.find(':');
        const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        const int version = controllers.empty() ? 2 : 1;
        if (version == 1 && !lists(controllers, controller)) continue;
        const Mount mount = mount_of(controller, version);
        if (mount.point.empty()) continue;
        std::string group = line.substr(second + 1);
        if (mount.root != "/" && group.compare(0, mount.root.size(), mount.root) == 0)
            group.erase(0, mount.root.size());
        while (true) {
            found.push_back({version, mount.point + (group == "/" ? "" : group)});
            const size_t slash = group.rfind('/');
            if (slash == std::string::npos || group == "/" || group.empty()) break;
            group.erase(slash);
        }
    }
    return found;
}

}  // namespace bmoe::os
