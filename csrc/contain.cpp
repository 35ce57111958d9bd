#include "contain.h"

#include <cstdio>
#include <exception>
#include <mutex>

#include "device/device_thread.h"
#include "error.h"
#include "ggml.h"
#include "log.h"

namespace bmoe {

namespace {

thread_local int n_contained = 0;

// ggml ends the process when this returns.
void on_assertion(const char *message) {
    lose_device(message);
    // An exception that left a destructor while another is on its way would end the process without a word.
    if (n_contained > 0 && std::uncaught_exceptions() == 0) throw Error(BMOE_E_INTERNAL, legible(message));
    LogSink *log = current_log();
    if (log && log->hook)
        log_line(*log, BMOE_LOG_ERROR, legible(message));
    else
        fprintf(stderr, "%s\n", message);
}

}  // namespace

Contained::Contained() { ++n_contained; }
Contained::~Contained() { --n_contained; }

void catch_assertions() {
    static std::once_flag once;
    std::call_once(once, [] { ggml_set_abort_callback(on_assertion); });
}

}  // namespace bmoe
