#include "tokenize.h"

#include <algorithm>
#include <cctype>
#include <climits>
#include <list>
#include <stdexcept>
#include <string_view>

#include "error.h"
#include "log.h"
#include "os/stack.h"

namespace bmoe {

bool touches(const Spans &spans, size_t begin, size_t end) {
    // The first span that ends behind `begin` is the only candidate: spans rise.
    const auto span =
        std::upper_bound(spans.begin(), spans.end(), begin, [](size_t at, const bmoe_span &s) { return at < s.end; });
    return span != spans.end() && span->begin < end && span->begin < span->end;
}

namespace {

// Many of llama.cpp's pre-tokenizers are a std::regex, which recurses once or more per character of a match, at 100 to
// 420 bytes of stack each [measured]. A match spans at most a run of blanks and a run of anything else.
constexpr size_t STACK_PER_BYTE = 1024;
constexpr size_t SMALL_RUN = 4096;       // fits any thread's stack
constexpr size_t LONGEST_RUN = 1 << 20;  // a stack of 2 GiB

bool is_space(char c) { return isspace(static_cast<unsigned char>(c)) != 0; }

// The longest run of blanks, or of anything else, in bytes.
size_t longest_run(const char *text, size_t n_bytes) {
    size_t longest = 0, begin = 0;
    for (size_t at = 1; at <= n_bytes; ++at) {
        if (at < n_bytes && is_space(text[at]) == is_space(text[begin])) continue;
        longest = std::max(longest, at - begin);
        begin = at;
    }
    return longest;
}

std::vector<llama_token> llama_tokens_here(const llama_vocab *vocab, const char *text, size_t n_bytes, bool special) {
    std::vector<llama_token> tokens(n_bytes + 8);
    const auto size = static_cast<int32_t>(n_bytes);
    int32_t n = llama_tokenize(vocab, text, size, tokens.data(), static_cast<int32_t>(tokens.size()), false, special);
    if (n < 0 && n != INT32_MIN) {
        tokens.resize(static_cast<size_t>(-n));
        n = llama_tokenize(vocab, text, size, tokens.data(), -n, false, special);
    }
    if (n < 0) fail(BMOE_E_INTERNAL, "llama.cpp could not tokenize a text of %zu bytes", n_bytes);
    tokens.resize(static_cast<size_t>(n));
    return tokens;
}

// llama.cpp reads four bytes as a character up to U+1FFFFF and throws where it has to write one above U+10FFFF. Behind
// another first byte, which begins no character, they are invalid bytes as any others are.
std::string within_unicode(const char *bytes, size_t n_bytes) {
    std::string text(bytes, n_bytes);
    for (size_t i = 0; i < n_bytes; ++i) {
        const auto first = static_cast<uint8_t>(text[i]);
        const auto second = static_cast<uint8_t>(i + 1 < n_bytes ? text[i + 1] : 0);
        if ((first >= 0xf5 && first <= 0xf7) || (first == 0xf4 && second >= 0x90)) text[i] = '\xff';
    }
    return text;
}

std::vector<llama_token> llama_tokens_of_any(const llama_vocab *vocab, const char *text, size_t n_bytes, bool special) {
    try {
        return llama_tokens_here(vocab, text, n_bytes, special);
    } catch (const std::invalid_argument &) {
        return llama_tokens_here(vocab, within_unicode(text, n_bytes).data(), n_bytes, special);
    }
}

std::vector<llama_token> llama_tokens(const llama_vocab *vocab, const char *text, size_t n_bytes, bool special) {
    if (n_bytes > INT_MAX / 2) {
        fail(BMOE_E_TOO_LONG, "a text of %zu bytes is longer than can be tokenized (%d)", n_bytes, INT_MAX / 2);
    }
    const size_t run = longest_run(text, n_bytes);
    if (run <= SMALL_RUN) return llama_tokens_of_any(vocab, text, n_bytes, special);
    if (run > LONGEST_RUN) {
        fail(BMOE_E_TOO_LONG, "a run of %zu bytes without a blank, or of blanks, cannot be tokenized (longest: %zu)",
             run, LONGEST_RUN);
    }
    std::vector<llama_token> tokens;
    LogSink *const log = current_log();
    os::run_with_stack((size_t{1} << 20) + 2 * run * STACK_PER_BYTE, [&] {
        const LogScope scope(log);
        tokens = llama_tokens_of_any(vocab, text, n_bytes, special);
    });
    return tokens;
}

}  // namespace

std::vector<llama_token> tokenize(const llama_vocab *vocab, const SpecialTokens &specials, const std::string &text,
                                  const Spans &data) {
    for (const bmoe_span &span : data) {
        if (span.begin == span.end) continue;
        const size_t reach = std::min(span.begin, specials.longest_control());
        for (const SpecialTokens::Match &match : specials.find_control(text, span.begin - reach, span.end)) {
            if (match.end > span.begin) return tokenize_cut(vocab, specials, text, data);
        }
    }
    return llama_tokens(vocab, text.data(), text.size(), true);
}

namespace {

struct Fragment {
    llama_token id;  // LLAMA_TOKEN_NULL: text still
    size_t begin;
    size_t end;
};

// Cut every allowed occurrence of one special token out of one fragment of text; what is left goes before `next`.
void cut(std::list<Fragment> &fragments, std::list<Fragment>::iterator next, Fragment piece,
         const SpecialTokens::Token &token, const std::string &text, const Spans &data) {
    const std::string_view up_to_end(text.data(), piece.end);
    size_t from = piece.begin;
    while (true) {
        const size_t at = up_to_end.find(token.text, from);
        if (at == std::string_view::npos) break;
        const size_t behind = at + token.text.size();
        if (token.control && touches(data, at, behind)) {
            from = at + 1;
            continue;
        }
        size_t left_end = at;
        while (token.strips_left && left_end > piece.begin && is_space(text[left_end - 1])) --left_end;
        if (left_end > piece.begin) fragments.insert(next, {LLAMA_TOKEN_NULL, piece.begin, left_end});
        fragments.insert(next, {token.id, at, behind});
        piece.begin = behind;
        while (token.strips_right && piece.begin < piece.end && is_space(text[piece.begin])) ++piece.begin;
        from = piece.begin;
    }
    if (piece.begin < piece.end) fragments.insert(next, piece);
}

}  // namespace

std::vector<llama_token> tokenize_cut(const llama_vocab *vocab, const SpecialTokens &specials, const std::string &text,
                                      const Spans &data) {
    std::list<Fragment> fragments;
    if (!text.empty()) fragments.push_back({LLAMA_TOKEN_NULL, 0, text.size()});
    for (const SpecialTokens::Token &token : specials.tokens()) {
        for (auto it = fragments.begin(); it != fragments.end();) {
            if (it->id != LLAMA_TOKEN_NULL) {
                ++it;
                continue;
            }
            const Fragment piece = *it;
            it = fragments.erase(it);
            cut(fragments, it, piece, token, text, data);
        }
    }
    std::vector<llama_token> tokens;
    for (const Fragment &fragment : fragments) {
        if (fragment.id != LLAMA_TOKEN_NULL) {
            tokens.push_back(fragment.id);
            continue;
        }
        // Each run of text follows a special token or the start here as in the whole, so tokenizers that treat such
        // a start specially see the same.
        const auto part = llama_tokens(vocab, text.data() + fragment.begin, fragment.end - fragment.begin, false);
        tokens.insert(tokens.end(), part.begin(), part.end());
    }
    return tokens;
}

void lead_with_bos(const llama_vocab *vocab, std::vector<llama_token> &tokens) {
    const llama_token bos = llama_vocab_bos(vocab);
    if (!llama_vocab_get_add_bos(vocab) || bos == LLAMA_TOKEN_NULL) return;
    size_t leading = 0;
    while (leading < tokens.size() && tokens[leading] == bos) ++leading;
    tokens.erase(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(leading));
    tokens.insert(tokens.begin(), bos);
}

std::string detokenize(const llama_vocab *vocab, const std::vector<llama_token> &tokens, bool special) {
    std::string text;
    std::vector<char> piece(256);
    for (const llama_token token : tokens) {
        int32_t n = llama_token_to_piece(vocab, token, piece.data(), static_cast<int32_t>(piece.size()), 0, special);
        if (n < 0) {
            piece.resize(static_cast<size_t>(-n));
            n = llama_token_to_piece(vocab, token, piece.data(), static_cast<int32_t>(piece.size()), 0, special);
        }
        if (n > 0) text.append(piece.data(), static_cast<size_t>(n));
    }
    return text;
}

int32_t token_attr(const llama_vocab *vocab, llama_token token) {
    const int attr = llama_vocab_get_attr(vocab, token);
    int32_t bits = 0;
    if (attr & (LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_UNKNOWN)) bits |= BMOE_TOKEN_CONTROL;
    if (attr & LLAMA_TOKEN_ATTR_USER_DEFINED) bits |= BMOE_TOKEN_USER_DEFINED;
    if (attr & LLAMA_TOKEN_ATTR_BYTE) bits |= BMOE_TOKEN_BYTE;
    if (attr & LLAMA_TOKEN_ATTR_UNUSED) bits |= BMOE_TOKEN_UNUSED;
    if (bits == 0) bits = BMOE_TOKEN_NORMAL;
    if (llama_vocab_is_eog(vocab, token)) bits |= BMOE_TOKEN_END;
    return bits;
}

}  // namespace bmoe
