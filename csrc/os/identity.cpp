#include "os/identity.h"

#include <sys/stat.h>

namespace bmoe::os {

bool identify(int file, FileIdentity &identity) {
    struct stat status{};
    if (fstat(file, &status) != 0) return false;
    identity.device = status.st_dev;
    identity.inode = status.st_ino;
    identity.n_bytes = static_cast<uint64_t>(status.st_size);
    identity.written_s = status.st_mtim.tv_sec;
    identity.written_ns = status.st_mtim.tv_nsec;
    return true;
}

std::string difference(const FileIdentity &was, const FileIdentity &is) {
    if (was.device != is.device || was.inode != is.inode) return "was replaced by another file";
    if (was.n_bytes != is.n_bytes)
        return "had " + std::to_string(was.n_bytes) + " bytes and has " + std::to_string(is.n_bytes) + " now";
    if (was.written_s != is.written_s || was.written_ns != is.written_ns) return "was written to while it was open";
    return "";
}

}  // namespace bmoe::os
