// llama.cpp maps a model file and asks the kernel to read all of it. While one is opened for streaming it must not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "os/identity.h"

namespace bmoe::os {

// While it lives, a file that this thread maps is not populated: of it only the given ranges are read ahead, and a page
// that is touched brings no others with it. The library is linked with --wrap=mmap,--wrap=posix_madvise. Does not nest.
class SparseMapping {
  public:
    using Ranges = std::vector<std::pair<uint64_t, uint64_t>>;  // [begin, end) in bytes of a file
    struct File {
        Ranges ranges;          // rising
        FileIdentity identity;  // that is expected
    };
    // Reads a file's ranges to where they belong in n_bytes of zeros, the file's first byte being at base. Empty, or why not.
    using Fill = std::function<std::string(size_t file, uint8_t *base)>;
    //   files   in the order in which they are mapped
    //   fill    given: memory that it has filled takes the place of each mapping
    SparseMapping(std::vector<File> files, Fill fill);
    ~SparseMapping();
    SparseMapping(const SparseMapping &) = delete;
    SparseMapping &operator=(const SparseMapping &) = delete;

    // A mapping of a file, for llama.cpp's call of mmap(); MAP_FAILED with failure() set.
    void *map(void *address, size_t n_bytes, int flags, int file, int64_t offset);
    // Why a file was not mapped; empty.
    const std::string &failure() const { return failure_; }
    // Where each file begins in memory, of those that were mapped.
    const std::vector<uint8_t *> &bases() const { return bases_; }

  private:
    void *mapped(void *address, size_t n_bytes, int flags, int file, int64_t offset, const Ranges &ranges);
    void *filled(void *address, size_t n_bytes, size_t index);

    std::vector<File> files_;
    Fill fill_;
    std::vector<uint8_t *> bases_;
    std::string failure_;
};

}  // namespace bmoe::os
