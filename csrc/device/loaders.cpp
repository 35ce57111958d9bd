#include "device/loaders.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <system_error>

#include "device/convert.h"
#include "device/device_thread.h"
#include "error.h"
#include "model_file.h"

namespace bmoe {

namespace {

constexpr auto LONGEST_WAIT = std::chrono::milliseconds(20);  // a cancel is to be noticed meanwhile

constexpr int64_t PADDED_ROW = 512;
constexpr size_t PADDING_BYTES = 512;

// Of a weight as it is in the model.
size_t bytes_of(const Weight &weight, const ggml_tensor &in_model, int32_t expert) {
    const size_t all = ggml_nbytes(&in_model);
    if (expert == LoadJob::ALL) return all;
    const size_t slice = in_model.nb[2], begin = slice * static_cast<size_t>(expert);
    return std::min(slice + (is_padded(weight) ? std::min(PADDING_BYTES, slice) : 0), all - begin);
}

}  // namespace

bool is_padded(const Weight &experts) {
    return !experts.is_converted() && ggml_is_quantized(experts.device.type) && experts.device.ne[0] % PADDED_ROW != 0;
}

Loaders::Loaders(int32_t n_threads, size_t n_groups, const Reader *reader, const DeviceFaults &faults)
    : reader_(reader), faults_(faults), n_left_(n_groups, 0) {
    try {
        for (int32_t i = 0; i < n_threads; ++i) {
            threads_.emplace_back([this, of = current_device_thread()] {
                join_device_thread(of);
                work();
            });
        }
    } catch (const std::system_error &error) {
        stop();
        fail(BMOE_E_MEMORY, "cannot start %d threads to load with: %s", n_threads, error.what());
    }
}

Loaders::~Loaders() { stop(); }

void Loaders::stop() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    work_.notify_all();
    for (std::thread &thread : threads_) thread.join();
    threads_.clear();
}

void Loaders::submit(const std::vector<LoadJob> &jobs, bool urgent) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        std::deque<LoadJob> &queue = urgent ? urgent_ : waiting_;
        queue.insert(queue.end(), jobs.begin(), jobs.end());
        for (const LoadJob &job : jobs) ++n_left_[job.group];
        // A loader that ran out of memory here would end the process.
        missed_.reserve(missed_.size() + n_running_ + urgent_.size() + waiting_.size());
    }
    work_.notify_all();
}

void Loaders::choose(size_t group, const std::vector<int32_t> &experts) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto end =
        std::stable_partition(waiting_.begin(), waiting_.end(), [&](const LoadJob &job) { return job.group != group; });
    for (auto job = end; job != waiting_.end(); ++job) {
        if (std::binary_search(experts.begin(), experts.end(), job->expert))
            urgent_.push_back(*job);
        else
            --n_left_[group];
    }
    waiting_.erase(end, waiting_.end());
}

std::vector<LoadJob> Loaders::take_missed(size_t group) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto end =
        std::stable_partition(missed_.begin(), missed_.end(), [&](const LoadJob &job) { return job.group != group; });
    std::vector<LoadJob> taken(end, missed_.end());
    missed_.erase(end, missed_.end());
    return taken;
}

bool Loaders::wait(size_t group, const std::function<bool()> &is_unwanted) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (n_left_[group] > 0 && failure_.empty()) {
        lock.unlock();
        if (is_unwanted()) return false;
        lock.lock();
        done_.wait_for(lock, LONGEST_WAIT, [&] { return n_left_[group] == 0 || !failure_.empty(); });
    }
    if (!failure_.empty()) fail(BMOE_E_READ, "%s", failure_.c_str());
    return true;
}

void Loaders::settle() {
    std::unique_lock<std::mutex> lock(mutex_);
    urgent_.clear();
    waiting_.clear();
    done_.wait(lock, [&] { return n_running_ == 0; });
    std::fill(n_left_.begin(), n_left_.end(), 0);
    failure_.clear();
    missed_.clear();
}

uint64_t Loaders::bytes_read() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return bytes_read_;
}

void Loaders::work() {
    std::vector<uint8_t> bytes, converted;  // kept from one job to the next
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        work_.wait(lock, [&] { return stop_ || !urgent_.empty() || !waiting_.empty(); });
        if (stop_) return;
        std::deque<LoadJob> &queue = urgent_.empty() ? waiting_ : urgent_;
        const LoadJob job = queue.front();
        queue.pop_front();
        ++n_running_;
        lock.unlock();
        uint64_t n_read = 0;
        std::string failure;
        try {
            failure = load(job, bytes, converted, n_read);
        } catch (const std::exception &error) {
            failure = std::string("cannot bring ") + job.weight->tensor->name + " to the device: " + error.what();
            lose_device(error);
        }
        lock.lock();
        --n_running_;
        --n_left_[job.group];
        bytes_read_ += n_read;
        if (job.is_guess && !failure.empty())
            missed_.push_back(job);
        else if (failure_.empty())
            failure_ = std::move(failure);
        done_.notify_all();
    }
}

std::string Loaders::load(const LoadJob &job, std::vector<uint8_t> &bytes, std::vector<uint8_t> &converted,
                          uint64_t &n_read) {
    if (faults_.slow_ms > 0) std::this_thread::sleep_for(std::chrono::milliseconds(faults_.slow_ms));
    const Weight &weight = *job.weight;
    ggml_tensor on_device = weight.device;
    ggml_tensor in_model = *weight.tensor;
    weight.host.put(in_model);
    const size_t index = job.expert == LoadJob::ALL ? 0 : static_cast<size_t>(job.expert);
    const size_t n_bytes = bytes_of(weight, in_model, job.expert), begin = in_model.nb[2] * index;
    const uint8_t *from = job.from ? job.from + begin : nullptr;
    if (!from) {
        constexpr size_t BLOCK = Reader::BLOCK;
        bytes.resize(std::max(bytes.size(), n_bytes + 3 * BLOCK));
        // A direct read wants memory and file aligned alike.
        const uint64_t offset = job.offset + begin;
        const auto address = reinterpret_cast<uintptr_t>(bytes.data());
        uint8_t *to = bytes.data() + (BLOCK - address % BLOCK) + offset % BLOCK;
        const std::string failure = reader_->read({job.file, offset, to, n_bytes, nullptr, 0}, n_read);
        if (!failure.empty())
            return job.expert == LoadJob::ALL ? std::string(in_model.name) + ": " + failure
                                              : "expert " + std::to_string(job.expert) + " of layer " +
                                                    std::to_string(layer_of(in_model.name)) + ": " + failure;
        from = to;
    }
    size_t n_device_bytes = n_bytes;
    if (weight.is_converted()) {
        const int64_t n_rows = job.expert == LoadJob::ALL ? ggml_nrows(&in_model) : in_model.ne[1];
        n_device_bytes = ggml_row_size(weight.device.type, in_model.ne[0]) * static_cast<size_t>(n_rows);
        converted.resize(std::max(converted.size(), n_device_bytes));
        convert_rows(from, in_model.type, converted.data(), weight.device.type, n_rows, in_model.ne[0]);
        from = converted.data();
    }
    const std::lock_guard<std::mutex> lock(device_);
    // What a device keeps behind a weight was overwritten by the layer before.
    if (job.expert == LoadJob::ALL &&
        ggml_backend_buffer_get_alloc_size(weight.device.buffer, &weight.device) > n_device_bytes)
        ggml_backend_buffer_init_tensor(weight.device.buffer, &on_device);
    if (faults_.throwing_load) throw std::runtime_error("ErrorDeviceLost");
    ggml_backend_tensor_set(&on_device, from, weight.device.nb[2] * index, n_device_bytes);
    return "";
}

}  // namespace bmoe
