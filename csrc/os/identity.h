// Which file it is that is open, and whether it was written to since.
#pragma once

#include <cstdint>
#include <string>

namespace bmoe::os {

struct FileIdentity {
    uint64_t device = 0, inode = 0, n_bytes = 0;
    int64_t written_s = 0, written_ns = 0;
};

// Of an open file. false: errno says why.
bool identify(int file, FileIdentity &identity);

// Empty, or what became of a file that had the identity `was`: "had 10 bytes and has 5 now".
std::string difference(const FileIdentity &was, const FileIdentity &is);

}  // namespace bmoe::os
