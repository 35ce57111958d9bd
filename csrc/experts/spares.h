// Pages of experts that were given back, for those that are read next: the kernel would clear new ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace bmoe {

class SparePages {
  public:
    // Whole pages whose content is not needed. They stay the process's until they are moved or dropped.
    void put(uintptr_t first, size_t n_bytes);
    // Have pages at [first, first + n_bytes), moved there from where they were spare; what they hold is undefined. Where
    // there are none of that size, the kernel's will be there when it is written.
    void move_to(uintptr_t first, size_t n_bytes);
    // To the kernel.
    void drop();

  private:
    bool take(size_t n_bytes, uintptr_t &first);

    std::unordered_map<uintptr_t, size_t> at_;                    // where → bytes
    std::unordered_map<size_t, std::vector<uintptr_t>> of_size_;  // bytes → where, some of them gone
    std::unordered_set<uintptr_t> moved_;  // where pages were moved to: each is a mapping of its own to the kernel
    bool can_move_ = true;
};

}  // namespace bmoe
