// What the targets share: engines over the models of a folder, and how they say that something is wrong.
#pragma once

#include <bmoe.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fuzz {

bmoe_open_params small();

// Of every model in the folder that BMOE_FUZZ_MODELS names, by name; the process ends where one cannot be opened.
std::vector<bmoe_engine *> open_all();

// Ends the process where it is not right.
void check(bool is_right, const char *what);

// Render messages and tokenize them, and check what is promised of both. Parts of the text, separated by 0x1e, become
// messages. Bits of flags: reasoning, generate, a system message first, add_bos. A vocabulary that is itself mutated may say
// that a plain letter is a control token: nothing is promised of those then.
int32_t render_and_tokenize(bmoe_engine *engine, const std::string &text, uint8_t flags, bool is_mutated = false);

}  // namespace fuzz
