// llama.cpp maps a model file and asks the kernel to read all of it. While one is opened for streaming it must not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace bmoe::os {

// While it lives, a file that this thread maps is not populated: of it only the given ranges are read ahead, and a page
// that is touched brings no others with it. The library is linked with --wrap=mmap,--wrap=posix_madvise. Does not nest.
class SparseMapping {
  public:
    using Ranges = std::vector<std::pair<uint64_t, uint64_t>>;  // [begin, end) in bytes of a file
    //   files   for each file in the order in which they are mapped
    explicit SparseMapping(std::vector<Ranges> files);
    ~SparseMapping();
    SparseMapping(const SparseMapping &) = delete;
    SparseMapping &operator=(const SparseMapping &) = delete;

    // Of the file that is mapped next.
    Ranges next();

  private:
    std::vector<Ranges> files_;
    size_t n_mapped_ = 0;
};

}  // namespace bmoe::os
