#include "special_tokens.h"

#include <algorithm>

namespace bmoe {

SpecialTokens::SpecialTokens(const llama_vocab *vocab) : trie_(1) {
    const int control_bits = LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_UNKNOWN;
    for (llama_token id = 0; id < llama_vocab_n_tokens(vocab); ++id) {
        const int attr = llama_vocab_get_attr(vocab, id);
        std::string text = llama_vocab_get_text(vocab, id);
        if (!(attr & (control_bits | LLAMA_TOKEN_ATTR_USER_DEFINED)) || text.empty()) continue;
        tokens_.push_back({id, std::move(text), (attr & control_bits) != 0, (attr & LLAMA_TOKEN_ATTR_LSTRIP) != 0,
                           (attr & LLAMA_TOKEN_ATTR_RSTRIP) != 0});
    }
    std::stable_sort(tokens_.begin(), tokens_.end(),
                     [](const Token &a, const Token &b) { return a.text.size() > b.text.size(); });
    for (const Token &token : tokens_) {
        if (!token.control) continue;
        longest_control_ = std::max(longest_control_, token.text.size());
        uint32_t at = 0;
        for (const char c : token.text) {
            const auto [step, added] =
                trie_[at].next.try_emplace(static_cast<unsigned char>(c), static_cast<uint32_t>(trie_.size()));
            at = step->second;
            if (added) trie_.emplace_back();
        }
        if (trie_[at].id == LLAMA_TOKEN_NULL) trie_[at].id = token.id;
    }
}

std::vector<SpecialTokens::Match> SpecialTokens::find_control(const std::string &text, size_t begin, size_t end) const {
    std::vector<Match> found;
    for (size_t start = begin; start < end; ++start) {
        uint32_t node = 0;
        Match match{LLAMA_TOKEN_NULL, start, start};
        for (size_t at = start; at < text.size(); ++at) {
            const auto step = trie_[node].next.find(static_cast<unsigned char>(text[at]));
            if (step == trie_[node].next.end()) break;
            node = step->second;
            if (trie_[node].id != LLAMA_TOKEN_NULL) match = {trie_[node].id, start, at + 1};
        }
        if (match.id != LLAMA_TOKEN_NULL) found.push_back(match);
    }
    return found;
}

}  // namespace bmoe
