// The vocabulary's special tokens, and where their texts stand in a text.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "bmoe.h"
#include "llama.h"

namespace bmoe {

class SpecialTokens {
  public:
    SpecialTokens() : trie_(1) {}  // of no vocabulary: nothing is special
    explicit SpecialTokens(const llama_vocab *vocab);

    struct Token {
        llama_token id;
        std::string text;
        bool control;  // only parsed where special tokens are; the others are parsed everywhere
        bool strips_left;
        bool strips_right;
    };
    // Longest text first: the order in which llama.cpp cuts them out of a text (tokenizer_st_partition).
    const std::vector<Token> &tokens() const { return tokens_; }

    struct Match {
        llama_token id;
        size_t begin;
        size_t end;
    };
    // Every place in [begin, end) of text where the text of a control token starts, the longest at each place.
    std::vector<Match> find_control(const std::string &text, size_t begin, size_t end) const;

    size_t longest_control() const { return longest_control_; }

  private:
    struct Node {
        std::map<unsigned char, uint32_t> next;
        llama_token id = LLAMA_TOKEN_NULL;
    };
    std::vector<Token> tokens_;
    std::vector<Node> trie_;  // of the control tokens' texts
    size_t longest_control_ = 0;
};

}  // namespace bmoe
