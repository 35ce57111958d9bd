// Rows of a weight from one ggml type to another.
#pragma once

#include <cstdint>

#include "ggml.h"

namespace bmoe {

// The rows of both are contiguous. Throws Error (BMOE_E_UNSUPPORTED).
void convert_rows(const void *from, ggml_type from_type, void *to, ggml_type to_type, int64_t n_rows,
                  int64_t n_per_row);

}  // namespace bmoe
