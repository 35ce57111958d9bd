// Text to tokens and back; where the caller's text stays data.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bmoe.h"
#include "llama.h"
#include "special_tokens.h"

namespace bmoe {

using Spans = std::vector<bmoe_span>;

// Tokens of a text whose spans are data, without BOS. Where no control token's text touches a span this is llama.cpp's
// tokenization of the whole; elsewhere tokenize_cut().
std::vector<llama_token> tokenize(const llama_vocab *vocab, const SpecialTokens &specials, const std::string &text,
                                  const Spans &data);

// The same by cutting the special tokens out ourselves, as llama.cpp does but for the control tokens that touch a span.
std::vector<llama_token> tokenize_cut(const llama_vocab *vocab, const SpecialTokens &specials, const std::string &text,
                                      const Spans &data);

// Put the model's BOS first if it wants one, and keep it single.
void lead_with_bos(const llama_vocab *vocab, std::vector<llama_token> &tokens);

std::string detokenize(const llama_vocab *vocab, const std::vector<llama_token> &tokens, bool special);

int32_t token_attr(const llama_vocab *vocab, llama_token token);

// Whether [begin, end) shares a byte with one of the spans.
bool touches(const Spans &spans, size_t begin, size_t end);

}  // namespace bmoe
