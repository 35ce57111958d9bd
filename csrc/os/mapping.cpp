#include "os/mapping.h"

#include <sys/mman.h>
#include <sys/types.h>

#include <algorithm>

namespace bmoe::os {

static thread_local SparseMapping *current = nullptr;

SparseMapping::SparseMapping(std::vector<Ranges> files) : files_(std::move(files)) { current = this; }
SparseMapping::~SparseMapping() { current = nullptr; }

SparseMapping::Ranges SparseMapping::next() { return n_mapped_ < files_.size() ? files_[n_mapped_++] : Ranges{}; }

}  // namespace bmoe::os

extern "C" {

void *__real_mmap(void *address, size_t n_bytes, int protection, int flags, int file, off_t offset);
int __real_posix_madvise(void *address, size_t n_bytes, int advice);

void *__wrap_mmap(void *address, size_t n_bytes, int protection, int flags, int file, off_t offset) {
    bmoe::os::SparseMapping *sparse = bmoe::os::current;
    if (!sparse || file < 0 || protection != PROT_READ)
        return __real_mmap(address, n_bytes, protection, flags, file, offset);
    void *mapped = __real_mmap(address, n_bytes, protection, flags & ~MAP_POPULATE, file, offset);
    if (mapped == MAP_FAILED) return mapped;
    __real_posix_madvise(mapped, n_bytes, POSIX_MADV_RANDOM);
    constexpr uint64_t PAGE = 4096, PIECE = 4 << 20;
    for (const auto &[begin, end] : sparse->next()) {
        const uint64_t first = begin / PAGE * PAGE;
        const uint64_t last = std::min<uint64_t>((end + PAGE - 1) / PAGE * PAGE, n_bytes);
        // The kernel reads no more than some MiB for one request.
        for (uint64_t at = first; at < last; at += PIECE)
            __real_posix_madvise(static_cast<char *>(mapped) + at, std::min(PIECE, last - at), POSIX_MADV_WILLNEED);
    }
    return mapped;
}

int __wrap_posix_madvise(void *address, size_t n_bytes, int advice) {
    if (bmoe::os::current && advice == POSIX_MADV_WILLNEED) return 0;
    return __real_posix_madvise(address, n_bytes, advice);
}
}
