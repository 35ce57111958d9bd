#include "os/mapping.h"

#include <sys/mman.h>
#include <sys/types.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>

extern "C" {
void *__real_mmap(void *address, size_t n_bytes, int protection, int flags, int file, off_t offset);
int __real_posix_madvise(void *address, size_t n_bytes, int advice);
}

namespace bmoe::os {

static thread_local SparseMapping *current = nullptr;

SparseMapping::SparseMapping(std::vector<File> files, Fill fill) : files_(std::move(files)), fill_(std::move(fill)) {
    current = this;
}
SparseMapping::~SparseMapping() { current = nullptr; }

void *SparseMapping::map(void *address, size_t n_bytes, int flags, int file, int64_t offset) {
    const size_t index = bases_.size();
    if (index >= files_.size()) return __real_mmap(address, n_bytes, PROT_READ, flags, file, offset);
    FileIdentity identity;
    failure_ = identify(file, identity) ? difference(files_[index].identity, identity) : strerror(errno);
    void *base = !failure_.empty() ? MAP_FAILED
                 : fill_           ? filled(address, n_bytes, index)
                                   : mapped(address, n_bytes, flags, file, offset, files_[index].ranges);
    if (base == MAP_FAILED) {
        if (failure_.empty()) failure_ = strerror(errno);
        errno = EIO;
        return base;
    }
    bases_.push_back(static_cast<uint8_t *>(base));
    return base;
}

void *SparseMapping::mapped(void *address, size_t n_bytes, int flags, int file, int64_t offset, const Ranges &ranges) {
    void *base = __real_mmap(address, n_bytes, PROT_READ, flags & ~MAP_POPULATE, file, offset);
    if (base == MAP_FAILED) return base;
    __real_posix_madvise(base, n_bytes, POSIX_MADV_RANDOM);
    constexpr uint64_t PAGE = 4096, PIECE = 4 << 20;
    for (const auto &[begin, end] : ranges) {
        const uint64_t first = begin / PAGE * PAGE;
        const uint64_t last = std::min<uint64_t>((end + PAGE - 1) / PAGE * PAGE, n_bytes);
        // The kernel reads no more than some MiB for one request.
        for (uint64_t at = first; at < last; at += PIECE)
            __real_posix_madvise(static_cast<char *>(base) + at, std::min(PIECE, last - at), POSIX_MADV_WILLNEED);
    }
    return base;
}

void *SparseMapping::filled(void *address, size_t n_bytes, size_t index) {
    void *base =
        __real_mmap(address, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return base;
    madvise(base, n_bytes, MADV_NOHUGEPAGE);  // one would reach into the experts, which are not read
    try {
        failure_ = fill_(index, static_cast<uint8_t *>(base));
    } catch (const std::exception &error) {
        failure_ = error.what();
    }
    if (failure_.empty()) {
        mprotect(base, n_bytes, PROT_READ);
        return base;
    }
    munmap(base, n_bytes);
    return MAP_FAILED;
}

}  // namespace bmoe::os

extern "C" {

void *__wrap_mmap(void *address, size_t n_bytes, int protection, int flags, int file, off_t offset) {
    bmoe::os::SparseMapping *sparse = bmoe::os::current;
    if (!sparse || file < 0 || protection != PROT_READ)
        return __real_mmap(address, n_bytes, protection, flags, file, offset);
    return sparse->map(address, n_bytes, flags, file, offset);
}

int __wrap_posix_madvise(void *address, size_t n_bytes, int advice) {
    if (bmoe::os::current && advice == POSIX_MADV_WILLNEED) return 0;
    return __real_posix_madvise(address, n_bytes, advice);
}
}
