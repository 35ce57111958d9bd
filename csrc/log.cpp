#include "log.h"

#include <mutex>
#include <new>

#include "common/log.h"
#include "device/device_thread.h"
#include "error.h"
#include "llama.h"

namespace bmoe {

static thread_local LogSink *current_sink = nullptr;

static int32_t level_of(ggml_log_level level, int32_t continued) {
    switch (level) {
        case GGML_LOG_LEVEL_ERROR:
            return BMOE_LOG_ERROR;
        case GGML_LOG_LEVEL_WARN:
            return BMOE_LOG_WARN;
        case GGML_LOG_LEVEL_DEBUG:
            return BMOE_LOG_DEBUG;
        case GGML_LOG_LEVEL_CONT:
            return continued;
        default:
            return BMOE_LOG_INFO;
    }
}

void log_line(LogSink &sink, int32_t level, const std::string &line) {
    if (level == BMOE_LOG_ERROR && sink.first_error.empty()) sink.first_error = line;
    if (sink.hook && level >= sink.level) on_caller([&] { sink.hook(level, line.c_str(), sink.user); });
}

// llama.cpp logs from destructors, among others: what cannot be said for want of memory is left unsaid.
static void route(ggml_log_level level, const char *text, void *) {
    LogSink *sink = current_sink;
    if (!sink) return;
    sink->line_level = level_of(level, sink->line_level);
    try {
        for (; *text; ++text) {
            if (*text != '\n') {
                sink->line += *text;
                continue;
            }
            std::string line = legible(sink->line);
            sink->line.clear();
            log_line(*sink, sink->line_level, line);
        }
    } catch (const std::bad_alloc &) {
        sink->line.clear();
    }
}

void install_log_router() {
    static std::once_flag once;
    std::call_once(once, [] {
        llama_log_set(route, nullptr);
        common_log_set_verbosity_thold(-1);  // common writes to the terminal by itself otherwise
    });
}

LogScope::LogScope(LogSink *sink) : outer_(current_sink) { current_sink = sink; }
LogSink *current_log() { return current_sink; }
LogScope::~LogScope() { current_sink = outer_; }

}  // namespace bmoe
