// The checksum of a saved state.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace bmoe {

// FNV-1a over 64-bit words in four lanes: at memory speed, since a state is restored for every decision.
// Source: the FNV constants of http://www.isthe.com/chongo/tech/comp/fnv/
inline uint64_t checksum(const uint8_t *bytes, size_t n_bytes) {
    constexpr uint64_t PRIME = 0x100000001b3ull;
    constexpr size_t WIDTH = 32;
    uint64_t lanes[4] = {0xcbf29ce484222325ull, 1, 2, 3};
    for (size_t at = 0; at < n_bytes; at += WIDTH) {
        uint64_t words[4] = {0, 0, 0, 0};
        memcpy(words, bytes + at, std::min(WIDTH, n_bytes - at));
        for (int i = 0; i < 4; ++i) {
            lanes[i] = (lanes[i] ^ words[i]) * PRIME;
            lanes[i] ^= lanes[i] >> 29;
        }
    }
    uint64_t sum = n_bytes;
    for (const uint64_t lane : lanes) sum = (sum ^ lane) * PRIME;
    return sum;
}

}  // namespace bmoe
