// llama.cpp's log, which is one per process, handed to the engine whose call is running on this thread.
#pragma once

#include <string>

#include "bmoe.h"

namespace bmoe {

struct LogSink {
    bmoe_log_fn hook = nullptr;
    void *user = nullptr;
    int32_t level = BMOE_LOG_WARN;

    int32_t line_level = BMOE_LOG_INFO;  // of the line being put together
    std::string line;
    std::string first_error;  // since it was last cleared: why llama.cpp returned null; later ones only repeat it
};

// Routes llama.cpp's and ggml's log to the thread's sink, once per process, and silences common's own logger.
void install_log_router();

// While it lives, what is logged on this thread goes to the sink. Nests.
class LogScope {
  public:
    explicit LogScope(LogSink *sink);
    ~LogScope();
    LogScope(const LogScope &) = delete;
    LogScope &operator=(const LogScope &) = delete;

  private:
    LogSink *outer_;
};

// The sink of this thread's innermost scope, for work that is handed to another thread; may be null.
LogSink *current_log();

void log_line(LogSink &sink, int32_t level, const std::string &line);

}  // namespace bmoe
