// Chat templates are told the date, for which llama.cpp calls localtime(): all threads of a process share its result. The
// library is linked with --wrap=localtime, and here each has its own.
#include <ctime>

extern "C" std::tm *__wrap_localtime(const std::time_t *time);

std::tm *__wrap_localtime(const std::time_t *time) {
    static thread_local std::tm mine;
    return localtime_r(time, &mine);
}
