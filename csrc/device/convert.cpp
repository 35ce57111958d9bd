#include "device/convert.h"

#include <algorithm>
#include <vector>

#include "error.h"

namespace bmoe {

void convert_rows(const void *from, ggml_type from_type, void *to, ggml_type to_type, int64_t n_rows,
                  int64_t n_per_row) {
    const ggml_to_float_t to_float = ggml_get_type_traits(from_type)->to_float;
    if (!to_float) fail(BMOE_E_UNSUPPORTED, "%s cannot be converted", ggml_type_name(from_type));
    const size_t stride = ggml_row_size(from_type, n_per_row), to_stride = ggml_row_size(to_type, n_per_row);
    std::vector<float> row(static_cast<size_t>(n_per_row));
    for (int64_t i = 0; i < n_rows; ++i) {
        const auto at = static_cast<size_t>(i);
        void *out = static_cast<char *>(to) + at * to_stride;
        to_float(static_cast<const char *>(from) + at * stride, row.data(), n_per_row);
        if (to_type == GGML_TYPE_F32)
            std::copy(row.begin(), row.end(), static_cast<float *>(out));
        else
            ggml_quantize_chunk(to_type, row.data(), out, 0, 1, n_per_row, nullptr);
    }
}

}  // namespace bmoe
