// One allocation that fails, each in its turn: what each call then answers, in a process of its own.
//
//   test_memory MODEL resident|streamed CALL         prints how many allocations the call makes
//   test_memory MODEL resident|streamed CALL N...    a line for each N, the allocation that fails:
//                                                     "N status S, again S" or "N signal S ADDRESS..."
//
// The addresses are those of the stack where the process ended, in this program's file.
#include <bmoe.h>
#include <execinfo.h>
#include <link.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace {

std::atomic<long> n_calls{0}, fails_at{-1};
std::atomic<bool> armed{false};

bool fails() { return armed && ++n_calls == fails_at; }

}  // namespace

extern "C" {
void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);

void *malloc(size_t n) {
    if (!fails()) return __libc_malloc(n);
    errno = ENOMEM;
    return nullptr;
}
void *calloc(size_t n, size_t size) {
    if (!fails()) return __libc_calloc(n, size);
    errno = ENOMEM;
    return nullptr;
}
void *realloc(void *p, size_t n) {
    if (!fails()) return __libc_realloc(p, n);
    errno = ENOMEM;
    return nullptr;
}
void *aligned_alloc(size_t alignment, size_t n) { return fails() ? nullptr : __libc_memalign(alignment, n); }
int posix_memalign(void **out, size_t alignment, size_t n) {
    void *p = fails() ? nullptr : __libc_memalign(alignment, n);
    if (p) *out = p;
    return p ? 0 : ENOMEM;
}
}

namespace {

const char TEXT[] = "Which is a fruit? <|im_end|> naïve 漢字 and some more words to be cut into tokens, 1234.";
uintptr_t base = 0;  // where this program's file begins in memory

int main_object(dl_phdr_info *info, size_t, void *) {
    base = info->dlpi_addr;
    return 1;  // the first one is the program
}

[[noreturn]] void tell_the_end(int signal) {
    armed = false;
    void *frames[48];
    const int n = backtrace(frames, 48);
    dprintf(STDOUT_FILENO, "signal %d", signal);
    for (int i = 0; i < n; ++i)
        dprintf(STDOUT_FILENO, " %#lx", static_cast<unsigned long>(reinterpret_cast<uintptr_t>(frames[i]) - base - 1));
    dprintf(STDOUT_FILENO, "\n");
    _exit(1);
}

struct Host {
    const char *path;
    bool streams;
    bmoe_engine *engine = nullptr;
    std::vector<int32_t> tokens{};
    std::vector<char> state{};

    int32_t open() {
        bmoe_open_params params;
        bmoe_open_params_init(&params);
        params.n_ctx = 256;
        params.n_ubatch = 32;
        params.n_threads = 1;
        params.stream = streams;
        params.cache_bytes = 0;
        char error[256];
        return bmoe_open(&engine, path, &params, error, sizeof error);
    }
    int32_t render() {
        const bmoe_message message = {"user", TEXT, sizeof TEXT - 1};
        char text[1024];
        bmoe_span spans[16];
        size_t n_bytes = 0, n_spans = 0;
        return bmoe_render(engine, &message, 1, 0, 1, text, sizeof text, &n_bytes, spans, 16, &n_spans);
    }
    int32_t tokenize() {
        tokens.resize(sizeof TEXT);
        size_t n = 0;
        const bmoe_span all = {0, 40};
        const int32_t status =
            bmoe_tokenize(engine, TEXT, sizeof TEXT - 1, &all, 1, 1, tokens.data(), tokens.size(), &n);
        if (status == BMOE_OK) tokens.resize(n);
        return status;
    }
    int32_t detokenize() {
        char text[1024];
        size_t n = 0;
        return bmoe_detokenize(engine, tokens.data(), tokens.size(), 1, text, sizeof text, &n);
    }
    int32_t prefill() { return bmoe_prefill(engine, tokens.data(), tokens.size(), nullptr); }
    int32_t sample() {
        int32_t token = 0;
        bmoe_sampling sampling;
        bmoe_sampling_init(&sampling);
        sampling.temperature = 1.0f;
        const int32_t status = bmoe_sampling_start(engine, &sampling);
        return status == BMOE_OK ? bmoe_sample(engine, &token) : status;
    }
    int32_t save() {
        size_t n = 0;
        const int32_t status = bmoe_state_size(engine, &n);
        if (status != BMOE_OK) return status;
        state.resize(n);
        return bmoe_state_save(engine, state.data(), n, &n);
    }
    int32_t load() { return bmoe_state_load(engine, state.data(), state.size()); }
    int32_t close() {
        bmoe_close(engine);
        engine = nullptr;
        return BMOE_OK;
    }
};

// Each call, in the order in which the ones before it have to be made.
const std::vector<std::pair<std::string, std::function<int32_t(Host &)>>> CALLS = {
    {"open", &Host::open},         {"render", &Host::render},
    {"tokenize", &Host::tokenize}, {"detokenize", &Host::detokenize},
    {"prefill", &Host::prefill},   {"sample", &Host::sample},
    {"save", &Host::save},         {"load", &Host::load},
    {"close", &Host::close},
};

// The call whose n-th allocation fails, after the ones before it; then again with none failing, and the end.
void run(const char *model, bool streams, const std::string &name, long n) {
    Host host{model, streams};
    for (const auto &[other, call] : CALLS) {
        if (other != name) {
            const int32_t status = call(host);
            if (status == BMOE_OK) continue;
            printf("%s before it failed with %d\n", other.c_str(), status);
            return;
        }
        host.tokens.reserve(256);
        host.state.reserve(1 << 20);
        n_calls = 0;
        fails_at = n;
        armed = true;
        const int32_t status = call(host);
        armed = false;
        if (n < 0) {
            printf("%ld\n", n_calls.load());
            return;
        }
        const bool has_text = status == BMOE_OK || name == "open" || bmoe_last_error(host.engine)[0] != '\0';
        const int32_t again = status == BMOE_OK ? BMOE_OK : call(host);
        bmoe_close(host.engine);
        printf("status %d, again %d%s\n", status, again, has_text ? "" : ", no text");
        return;
    }
}

}  // namespace

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    const bool streams = strcmp(argv[2], "streamed") == 0;
    if (argc == 4) {
        run(argv[1], streams, argv[3], -1);
        return 0;
    }
    dl_iterate_phdr(main_object, nullptr);
    void *warm[4];
    backtrace(warm, 4);  // loads what it needs
    for (int i = 4; i < argc; ++i) {
        printf("%s ", argv[i]);
        fflush(stdout);
        const pid_t child = fork();
        if (child == 0) {
            for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGALRM})
                std::signal(signal, tell_the_end);
            alarm(20);
            run(argv[1], streams, argv[3], atol(argv[i]));
            fflush(stdout);
            _exit(0);
        }
        int status = 0;
        waitpid(child, &status, 0);
        if (WIFSIGNALED(status)) printf("signal %d\n", WTERMSIG(status));
    }
    return 0;
}
