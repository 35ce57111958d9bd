// Handles of the C API: names in a table, never addresses, so that a stale one is an error and not a crash.
#pragma once

#include <memory>

#include "bmoe.h"
#include "engine.h"

namespace bmoe {

bmoe_engine *add_handle(std::shared_ptr<Engine> engine);
// Null when the handle names no open engine of this process.
std::shared_ptr<Engine> find_handle(const bmoe_engine *handle);
std::shared_ptr<Engine> remove_handle(const bmoe_engine *handle);

}  // namespace bmoe
