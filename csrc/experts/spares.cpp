#include "experts/spares.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

namespace bmoe {

namespace {

// The kernel allows a process 65,530 mappings (vm.max_map_count), and a place that was moved to parts its range in three.
constexpr size_t MOST_MOVED = 16000;

void *pointer(uintptr_t address) { return reinterpret_cast<void *>(address); }

bool move_pages(uintptr_t from, size_t n_bytes, uintptr_t to) {
#if defined(MREMAP_DONTUNMAP)
    const int how = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
    return mremap(pointer(from), n_bytes, n_bytes, how, pointer(to)) != MAP_FAILED;
#else
    (void)from, (void)n_bytes, (void)to;
    return false;
#endif
}

}  // namespace

void SparePages::put(uintptr_t first, size_t n_bytes) {
    if (!can_move_) {
        madvise(pointer(first), n_bytes, MADV_DONTNEED);
        return;
    }
    at_[first] = n_bytes;
    of_size_[n_bytes].push_back(first);
}

bool SparePages::take(size_t n_bytes, uintptr_t &first) {
    const auto found = of_size_.find(n_bytes);
    if (found == of_size_.end()) return false;
    while (!found->second.empty()) {
        first = found->second.back();
        found->second.pop_back();
        if (at_.erase(first) > 0) return true;
    }
    return false;
}

void SparePages::move_to(uintptr_t first, size_t n_bytes) {
    if (at_.erase(first) > 0) return;  // its own
    if (at_.empty() || (moved_.size() >= MOST_MOVED && moved_.count(first) == 0)) return;
    static const auto PAGE = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    uintptr_t from = 0;
    // A slice that begins elsewhere in its first page has one whole page more or less.
    for (const size_t size : {n_bytes, n_bytes + PAGE, n_bytes - PAGE}) {
        if (size == 0 || !take(size, from)) continue;
        const size_t n_moved = std::min(size, n_bytes);
        can_move_ = move_pages(from, n_moved, first);
        if (can_move_) moved_.insert(first);
        if (!can_move_) drop();
        if (!can_move_ || size > n_moved)
            madvise(pointer(can_move_ ? from + n_moved : from), can_move_ ? size - n_moved : size, MADV_DONTNEED);
        return;
    }
}

void SparePages::drop() {
    for (const auto &[first, n_bytes] : at_) madvise(pointer(first), n_bytes, MADV_DONTNEED);
    at_.clear();
    of_size_.clear();
}

}  // namespace bmoe
