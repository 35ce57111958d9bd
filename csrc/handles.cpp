#include "handles.h"

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

namespace bmoe {

namespace {

struct Table {
    std::mutex mutex;
    std::unordered_map<uintptr_t, std::shared_ptr<Engine>> engines;
};

std::atomic<Table *> table{nullptr};
std::atomic<uintptr_t> next_name{1};

// A forked child has none of the threads and maybe a locked mutex: it starts with an empty table of its own, and the
// parent's engines are left alone there (their memory is the parent's to free).
void forget_in_child() { table = new Table; }

// Never destroyed: handles may be used, and engines be open, while the process exits.
Table &the_table() {
    static std::once_flag once;
    std::call_once(once, [] {
        table = new Table;
        pthread_atfork(nullptr, nullptr, forget_in_child);
    });
    return *table;
}

uintptr_t name_of(const bmoe_engine *handle) { return reinterpret_cast<uintptr_t>(handle); }

}  // namespace

bmoe_engine *add_handle(std::shared_ptr<Engine> engine) {
    Table &t = the_table();
    const uintptr_t name = next_name.fetch_add(1) * 16;
    const std::lock_guard<std::mutex> lock(t.mutex);
    t.engines.emplace(name, std::move(engine));
    return reinterpret_cast<bmoe_engine *>(name);
}

std::shared_ptr<Engine> find_handle(const bmoe_engine *handle) {
    Table &t = the_table();
    const std::lock_guard<std::mutex> lock(t.mutex);
    const auto found = t.engines.find(name_of(handle));
    return found == t.engines.end() ? nullptr : found->second;
}

std::shared_ptr<Engine> remove_handle(const bmoe_engine *handle) {
    Table &t = the_table();
    const std::lock_guard<std::mutex> lock(t.mutex);
    const auto found = t.engines.find(name_of(handle));
    if (found == t.engines.end()) return nullptr;
    std::shared_ptr<Engine> engine = std::move(found->second);
    t.engines.erase(found);
    return engine;
}

}  // namespace bmoe
