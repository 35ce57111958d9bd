// Status codes inside the library: an Error is thrown, and becomes a code and a text at the border (api.cpp).
#pragma once

#include <cstdarg>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "bmoe.h"

namespace bmoe {

struct Error : std::runtime_error {
    int32_t status;
    Error(int32_t status_, const std::string &text) : std::runtime_error(text), status(status_) {}
};

// Throw an Error with a printf-style text.
[[noreturn]] void fail(int32_t status, const char *format, ...) __attribute__((format(printf, 2, 3)));

// Bytes as text that any terminal can show: control bytes and invalid UTF-8 become \xNN; one line.
std::string legible(const std::string &bytes);

// The same into a field, cut where it does not fit.
template <size_t N>
void put_legible(char (&field)[N], const std::string &bytes) {
    const std::string text = legible(bytes);
    field[text.copy(field, N - 1)] = '\0';
}

}  // namespace bmoe
