#include "os/stack.h"

#include <pthread.h>

#include <exception>

#include "error.h"

namespace bmoe::os {

namespace {

struct Call {
    const std::function<void()> &body;
    std::exception_ptr thrown;
};

void *start(void *argument) {
    auto *call = static_cast<Call *>(argument);
    try {
        call->body();
    } catch (...) {
        call->thrown = std::current_exception();
    }
    return nullptr;
}

}  // namespace

void run_with_stack(size_t stack_bytes, const std::function<void()> &body) {
    Call call{body, nullptr};
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    const bool sized = pthread_attr_setstacksize(&attributes, stack_bytes) == 0;
    const bool started = sized && pthread_create(&thread, &attributes, start, &call) == 0;
    pthread_attr_destroy(&attributes);
    if (!started) fail(BMOE_E_MEMORY, "cannot have a stack of %zu MiB, which this text needs", stack_bytes >> 20);
    pthread_join(thread, nullptr);
    if (call.thrown) std::rethrow_exception(call.thrown);
}

}  // namespace bmoe::os
