#include "template_check.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace bmoe {

namespace {

using Tokens = std::vector<jinja::token>;
using jinja::token;

constexpr size_t MAX_TAG_WORDS = 1024;  // within the brackets of one {{ }} or {% %}
constexpr size_t MAX_DEPTH = 200;       // of blocks in blocks

bool is(const Tokens &tokens, size_t at, token::type type) { return at < tokens.size() && tokens[at].t == type; }

bool is_name(const Tokens &tokens, size_t at, const std::string &name) {
    return is(tokens, at, token::identifier) && tokens[at].value == name;
}

// Where the tag that `at` is in closes.
size_t tag_end(const Tokens &tokens, size_t at) {
    while (at < tokens.size() && tokens[at].t != token::close_statement && tokens[at].t != token::close_expression)
        ++at;
    return at;
}

bool opens_block(const Tokens &tokens, size_t at) {
    const std::string &name = tokens[at].value;
    if (name != "set") return name == "if" || name == "for" || name == "macro" || name == "call" || name == "filter";
    for (const size_t end = tag_end(tokens, at); at < end; ++at)
        if (tokens[at].t == token::equals) return false;
    return true;
}

bool closes_block(const std::string &name) {
    return name == "endif" || name == "endfor" || name == "endmacro" || name == "endcall" || name == "endfilter" ||
           name == "endset";
}

// The parser recurses for each bracket and block, before it allocates anything.
void check_depth(const Tokens &tokens) {
    size_t words = 0, depth = 0;
    std::vector<size_t> blocks;  // how much each open block adds: an elif is a block within its if
    for (size_t i = 0; i < tokens.size(); ++i) {
        const token::type type = tokens[i].t;
        const bool opens = type == token::open_statement || type == token::open_expression;
        words = opens || type == token::text ? 0 : words + 1;
        if (words > MAX_TAG_WORDS)
            throw std::runtime_error("one of its tags is over " + std::to_string(MAX_TAG_WORDS) + " words long");
        if (type != token::open_statement || i + 1 == tokens.size()) continue;
        if (closes_block(tokens[i + 1].value) && !blocks.empty()) {
            depth -= blocks.back();
            blocks.pop_back();
        } else if (opens_block(tokens, i + 1)) {
            blocks.push_back(1);
            ++depth;
        } else if (tokens[i + 1].value == "elif" && !blocks.empty()) {
            ++blocks.back();
            ++depth;
        }
        if (depth > MAX_DEPTH)
            throw std::runtime_error("its blocks are nested over " + std::to_string(MAX_DEPTH) + " deep");
    }
}

// llama.cpp divides without looking, and a division by zero is a signal, not an exception.
void check_division(const Tokens &tokens, size_t at) {
    const bool named = is(tokens, at, token::identifier) || is(tokens, at, token::string_literal);
    if (!named || tokens[at].value != "divisibleby") return;
    const bool by_number = is(tokens, at, token::identifier) && is(tokens, at + 1, token::open_paren) &&
                           is(tokens, at + 2, token::numeric_literal) && is(tokens, at + 3, token::close_paren);
    const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
    const std::string number = by_number ? tokens[at + 2].value : "";
    if (number.find_first_of("123456789") == std::string::npos || !std::all_of(number.begin(), number.end(), is_digit))
        throw std::runtime_error("it asks for divisibleby something else than a whole number above 0");
}

// A value that holds itself is walked without end.
void check_holds_itself(const Tokens &tokens, size_t at) {
    if (!is(tokens, at, token::identifier) || !is(tokens, at + 1, token::dot)) return;
    const bool appends = is_name(tokens, at + 2, "append") && is(tokens, at + 3, token::open_paren);
    const bool is_set = at >= 2 && is_name(tokens, at - 1, "set") && is(tokens, at - 2, token::open_statement);
    if (!appends && !is_set) return;
    for (size_t i = at + 3; i < tag_end(tokens, at); ++i) {
        if (is_name(tokens, i, tokens[at].value) && !is(tokens, i - 1, token::dot) && !is(tokens, i + 1, token::dot))
            throw std::runtime_error("it puts " + tokens[at].value + " into itself");
    }
}

}  // namespace

void check_template(const Tokens &tokens) {
    check_depth(tokens);
    for (size_t at = 0; at < tokens.size(); ++at) {
        check_division(tokens, at);
        check_holds_itself(tokens, at);
    }
}

}  // namespace bmoe
