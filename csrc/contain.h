// What becomes of an assertion of llama.cpp or ggml that fails. By itself it ends the process.
#pragma once

namespace bmoe {

// While it lives, one that fails on this thread throws Error (BMOE_E_INTERNAL) in place. For where no other thread computes
// along: those would wait for this one for ever.
class Contained {
  public:
    Contained();
    ~Contained();
    Contained(const Contained &) = delete;
    Contained &operator=(const Contained &) = delete;
};

// Once per process.
void catch_assertions();

}  // namespace bmoe
