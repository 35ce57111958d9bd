// A bound on what foreign code on this thread may allocate, and on how deep it may recurse meanwhile.
#pragma once

#include <cstddef>

namespace bmoe::os {

// While it lives, every operator new of this thread is counted, llama.cpp's included: the library is linked with
// --wrap=_Znwm. Code that neither ends nor returns allocates without end as well, so this stops a loop and a recursion
// where no one else could. Does not nest.
class HeapBudget {
  public:
    // Thrown from operator new. No std::exception: what code catches to describe an error must not swallow it.
    struct Exceeded {
        const char *what;
    };

    struct Limits {
        size_t bytes;        // of operator new in all; what is freed does not count back
        size_t calls;        // of operator new
        size_t largest;      // bytes of one call
        size_t stack_bytes;  // between the budget's frame and that of an allocation
    };

    explicit HeapBudget(const Limits &limits);
    ~HeapBudget();
    HeapBudget(const HeapBudget &) = delete;
    HeapBudget &operator=(const HeapBudget &) = delete;

    void spend(size_t bytes);

  private:
    Limits left_;
    const char *base_;
};

}  // namespace bmoe::os
