#include "error.h"

#include <cstdio>
#include <vector>

namespace bmoe {

void fail(int32_t status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    va_list again;
    va_copy(again, args);
    const int length = vsnprintf(nullptr, 0, format, args);
    va_end(args);
    std::vector<char> text(length < 0 ? 1 : static_cast<size_t>(length) + 1, '\0');
    vsnprintf(text.data(), text.size(), format, again);
    va_end(again);
    throw Error(status, std::string(text.data()));
}

// Length of the valid UTF-8 sequence at bytes[at], or 0.
static size_t utf8_length(const std::string &bytes, size_t at) {
    const auto byte = [&](size_t i) { return static_cast<unsigned char>(bytes[i]); };
    const unsigned char lead = byte(at);
    size_t length = 0;
    if (lead < 0x80) return 1;
    if (lead >= 0xC2 && lead < 0xE0)
        length = 2;
    else if (lead >= 0xE0 && lead < 0xF0)
        length = 3;
    else if (lead >= 0xF0 && lead < 0xF5)
        length = 4;
    else
        return 0;
    if (at + length > bytes.size()) return 0;
    for (size_t i = 1; i < length; ++i) {
        if ((byte(at + i) & 0xC0) != 0x80) return 0;
    }
    const unsigned char second = byte(at + 1);
    if (lead == 0xE0 && second < 0xA0) return 0;
    if (lead == 0xED && second >= 0xA0) return 0;
    if (lead == 0xF0 && second < 0x90) return 0;
    if (lead == 0xF4 && second >= 0x90) return 0;
    return length;
}

std::string legible(const std::string &bytes) {
    std::string out;
    for (size_t at = 0; at < bytes.size();) {
        const unsigned char byte = static_cast<unsigned char>(bytes[at]);
        const size_t length = utf8_length(bytes, at);
        if (length == 0 || byte < 0x20 || byte == 0x7F) {
            char hex[5];
            snprintf(hex, sizeof hex, "\\x%02x", byte);
            out += hex;
            at += 1;
        } else {
            out.append(bytes, at, length);
            at += length;
        }
    }
    return out;
}

}  // namespace bmoe
