// What is refused about a chat template before it runs: what would end the process where no bound on it could act.
#pragma once

#include <vector>

#include "jinja/lexer.h"

namespace bmoe {

// Throws std::runtime_error, saying what it is.
void check_template(const std::vector<jinja::token> &tokens);

}  // namespace bmoe
