// Threads that bring weights to the device: from the host's memory, or from the model's file.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "device/device.h"
#include "device/plan.h"
#include "experts/reader.h"

namespace bmoe {

// A weight, or one expert of it.
struct LoadJob {
    static constexpr int32_t ALL = -1;
    const Weight *weight = nullptr;
    int32_t expert = ALL;
    size_t group = 0;               // of jobs that are waited for together
    const uint8_t *from = nullptr;  // the weight in the host's memory; null: in the file
    int32_t file = 0;
    uint64_t offset = 0;  // of the weight
    bool is_guess = false;
};

// Whether a device may read beyond the end of an expert, where it pads rows. What is there must be finite, so it is handed
// over with some bytes of the next one, which are the same whoever writes them.
bool is_padded(const Weight &experts);

class Loaders {
  public:
    // The reader is used for its files alone, and outlives this; null where nothing streams.
    Loaders(int32_t n_threads, size_t n_groups, const Reader *reader, const DeviceFaults &faults);
    ~Loaders();
    Loaders(const Loaders &) = delete;
    Loaders &operator=(const Loaders &) = delete;

    void submit(const std::vector<LoadJob> &jobs, bool urgent);
    // Of the jobs of a group that wait, make those of these experts (rising) urgent, and drop the others.
    void choose(size_t group, const std::vector<int32_t> &experts);
    // The guesses of a group that could not be brought, once: that is no failure before they are known to be needed.
    std::vector<LoadJob> take_missed(size_t group);
    // Wait until all of a group is on the device; false where is_unwanted, asked every 20 ms, said so first. Throws Error
    // (BMOE_E_READ).
    bool wait(size_t group, const std::function<bool()> &is_unwanted);
    // What waits is dropped, what runs is waited for, and what failed is forgotten.
    void settle();

    uint64_t bytes_read();

  private:
    void work();
    std::string load(const LoadJob &job, std::vector<uint8_t> &bytes, std::vector<uint8_t> &converted,
                     uint64_t &n_read);
    void stop();

    const Reader *reader_;
    DeviceFaults faults_;
    std::mutex mutex_;
    std::mutex device_;  // no backend promises to take bytes from two threads at once
    std::condition_variable work_, done_;
    std::deque<LoadJob> urgent_, waiting_;
    std::vector<LoadJob> missed_;
    std::vector<size_t> n_left_;  // of each group
    size_t n_running_ = 0;
    uint64_t bytes_read_ = 0;
    std::string failure_;
    bool stop_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace bmoe
