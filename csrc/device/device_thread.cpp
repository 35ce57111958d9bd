#include "device/device_thread.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <list>
#include <mutex>
#include <new>
#include <system_error>
#include <utility>

#include "error.h"

namespace bmoe {

struct DeviceThread::State {
    std::mutex mutex;
    std::condition_variable changed;
    std::function<void()> body;                   // to be run, or running
    const std::function<void()> *hook = nullptr;  // to be run by the caller
    std::exception_ptr thrown;
    bool is_running = false, stop = false;
    std::string lost;
};

namespace {

using State = DeviceThread::State;

thread_local std::shared_ptr<State> current;

// Never destroyed: a device can be lost while the process exits.
struct All {
    std::mutex mutex;
    std::list<std::weak_ptr<State>> states;
};
All &all() {
    static All *const them = new All;
    return *them;
}

// A thread that may not return: what it holds others still use.
[[noreturn]] void stay() {
    while (true) std::this_thread::sleep_for(std::chrono::hours(24));
}

void mark(State &state, const std::string &why) {
    const std::lock_guard<std::mutex> lock(state.mutex);
    if (state.lost.empty()) state.lost = why;
    state.changed.notify_all();
}

void work(const std::shared_ptr<State> &state) {
    current = state;
    std::unique_lock<std::mutex> lock(state->mutex);
    while (true) {
        state->changed.wait(lock, [&] { return state->is_running || state->stop; });
        if (!state->is_running) return;
        lock.unlock();
        std::exception_ptr thrown;
        try {
            state->body();
        } catch (...) {
            thrown = std::current_exception();
        }
        lock.lock();
        state->thrown = thrown;
        state->is_running = false;
        state->changed.notify_all();
    }
}

// Of a backend's sources, other than the CPU's.
bool is_of_a_device(const char *message) {
    const char *folder = strstr(message, "ggml/src/ggml-");
    const char *end = folder ? strchr(folder + strlen("ggml/src/ggml-"), '/') : nullptr;
    const char *line = strchr(message, ':');
    return end && line && end < line && strncmp(folder, "ggml/src/ggml-cpu/", strlen("ggml/src/ggml-cpu/")) != 0;
}

}  // namespace

DeviceThread::DeviceThread() : state_(std::make_shared<State>()) {
    {
        const std::lock_guard<std::mutex> lock(all().mutex);
        all().states.remove_if([](const std::weak_ptr<State> &state) { return state.expired(); });
        all().states.push_back(state_);
    }
    try {
        thread_ = std::thread(work, state_);
    } catch (const std::system_error &error) {
        fail(BMOE_E_MEMORY, "cannot start a thread for the device: %s", error.what());
    }
}

DeviceThread::~DeviceThread() {
    {
        const std::lock_guard<std::mutex> lock(state_->mutex);
        state_->stop = true;
    }
    state_->changed.notify_all();
    thread_.join();
}

void DeviceThread::run(std::function<void()> body) {
    if (current == state_) return body();
    State &state = *state_;
    std::unique_lock<std::mutex> lock(state.mutex);
    if (state.lost.empty()) {
        state.body = std::move(body);
        state.is_running = true;
        state.changed.notify_all();
    }
    while (state.is_running && state.lost.empty()) {
        state.changed.wait(lock, [&] { return !state.is_running || state.hook || !state.lost.empty(); });
        if (!state.hook || !state.lost.empty()) continue;
        const std::function<void()> &hook = *state.hook;
        lock.unlock();
        hook();
        lock.lock();
        state.hook = nullptr;
        state.changed.notify_all();
    }
    if (!state.lost.empty()) {
        state.hook = nullptr;
        state.changed.notify_all();
        fail(BMOE_E_INTERNAL, "the prefill device was lost: %s", state.lost.c_str());
    }
    state.body = nullptr;
    if (state.thrown) std::rethrow_exception(std::exchange(state.thrown, nullptr));
}

std::string DeviceThread::lost() const {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    return state_->lost;
}

std::shared_ptr<State> current_device_thread() { return current; }
void join_device_thread(std::shared_ptr<State> state) { current = std::move(state); }

void on_caller(const std::function<void()> &hook) {
    if (!current) return hook();
    std::unique_lock<std::mutex> lock(current->mutex);
    if (!current->lost.empty()) return;
    current->hook = &hook;
    current->changed.notify_all();
    current->changed.wait(lock, [&] { return !current->hook; });
}

void lose_device(const char *message) {
    if (!is_of_a_device(message)) return;
    const std::string why = legible(message);
    if (current) {
        mark(*current, why);
        stay();
    }
    // A thread of the backend's own does not say for which engine it works.
    bool any = false;
    {
        const std::lock_guard<std::mutex> lock(all().mutex);
        for (const std::weak_ptr<State> &weak : all().states) {
            const std::shared_ptr<State> state = weak.lock();
            if (!state) continue;
            {
                const std::lock_guard<std::mutex> of_state(state->mutex);
                if (!state->is_running) continue;
            }
            mark(*state, why);
            any = true;
        }
    }
    if (any) stay();
}

void lose_device(const std::exception &thrown) {
    const bool is_ours = dynamic_cast<const Error *>(&thrown) || dynamic_cast<const std::bad_alloc *>(&thrown);
    if (current && !is_ours) mark(*current, legible(thrown.what()));
}

}  // namespace bmoe
