#include "experts/reader.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <system_error>

#include "error.h"

namespace bmoe {

namespace {

constexpr auto LONGEST_WAIT = std::chrono::milliseconds(20);  // a cancel is to be noticed meanwhile

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// pread until everything is there; the errno, or 0. Ends early, with 0, at the end of the file.
int read_whole(int file, uint8_t *to, size_t n_bytes, uint64_t offset, size_t &n_read) {
    n_read = 0;
    while (n_read < n_bytes) {
        const ssize_t n = pread(file, to + n_read, n_bytes - n_read, static_cast<off_t>(offset + n_read));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return errno;
        if (n == 0) return 0;
        n_read += static_cast<size_t>(n);
    }
    return 0;
}

// The blocks of a job past the page cache; the errno, 0, or ENODATA where not all of it came at once. Whole blocks go where
// they belong. One that is shared with a neighbour goes through a buffer, and only its own bytes are copied: the neighbour
// may be computed with, and on an encrypted disk a direct read has other bytes in its pages until it is done.
int read_direct(int file, const ReadJob &job, uint64_t &n_read) {
    constexpr uint64_t BLOCK = Reader::BLOCK;
    alignas(Reader::BLOCK) static thread_local uint8_t first[Reader::BLOCK], last[Reader::BLOCK];
    const uint64_t job_end = job.offset + job.n_bytes;
    const uint64_t begin = job.offset / BLOCK * BLOCK, end = (job_end + BLOCK - 1) / BLOCK * BLOCK;
    const bool ragged_head = begin != job.offset || (end - begin == BLOCK && end != job_end);
    const bool ragged_tail = end != job_end && end - begin > BLOCK;
    const uint64_t inner = begin + (ragged_head ? BLOCK : 0), inner_end = end - (ragged_tail ? BLOCK : 0);
    iovec parts[3];
    int n_parts = 0;
    if (ragged_head) parts[n_parts++] = {first, BLOCK};
    if (inner < inner_end) parts[n_parts++] = {job.to + (inner - job.offset), inner_end - inner};
    if (ragged_tail) parts[n_parts++] = {last, BLOCK};
    ssize_t n = 0;
    do n = preadv(file, parts, n_parts, static_cast<off_t>(begin));
    while (n < 0 && errno == EINTR);
    if (n < 0) return errno;
    n_read += static_cast<uint64_t>(n);
    if (begin + static_cast<uint64_t>(n) < job_end) return ENODATA;
    if (ragged_head) memcpy(job.to, first + (job.offset - begin), std::min(begin + BLOCK, job_end) - job.offset);
    if (ragged_tail) memcpy(job.to + (inner_end - job.offset), last, job_end - inner_end);
    return 0;
}

}  // namespace

Reader::Reader(const std::vector<std::string> &paths, int32_t n_lanes, bool direct) : direct_(direct) {
    files_.reserve(paths.size());
    for (const std::string &path : paths) {
        File file;
        file.path = path;
        file.buffered = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (file.buffered < 0 || !os::identify(file.buffered, file.identity)) {
            const int why = errno;
            files_.push_back(file);
            close_files();
            fail(BMOE_E_MODEL, "cannot open %s: %s", legible(path).c_str(), strerror(why));
        }
        posix_fadvise(file.buffered, 0, 0, POSIX_FADV_RANDOM);  // exactly what is asked for, no window around it
        if (direct_) file.direct = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
        const bool exhausted = direct_ && file.direct < 0 && (errno == EMFILE || errno == ENFILE);
        const int why = errno;
        direct_ = direct_ && file.direct >= 0;
        files_.push_back(file);
        if (exhausted) {
            close_files();
            fail(BMOE_E_MODEL, "cannot open %s: %s", legible(path).c_str(), strerror(why));
        }
    }
    try {
        lanes_.reserve(static_cast<size_t>(n_lanes));
        for (int32_t i = 0; i < n_lanes; ++i) lanes_.emplace_back([this] { lane(); });
    } catch (const std::bad_alloc &) {
        stop();
        throw;
    } catch (const std::system_error &error) {
        stop();
        fail(BMOE_E_MEMORY, "cannot start %d threads to read with: %s", n_lanes, error.what());
    }
}

Reader::~Reader() { stop(); }

void Reader::stop() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
        urgent_.clear();
        waiting_.clear();
    }
    work_.notify_all();
    for (std::thread &thread : lanes_) thread.join();
    lanes_.clear();
    close_files();
    files_.clear();
}

void Reader::close_files() {
    for (const File &file : files_) {
        if (file.direct >= 0) close(file.direct);
        if (file.buffered >= 0) close(file.buffered);
    }
}

void Reader::submit(const std::vector<ReadJob> &jobs, bool urgent) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        std::deque<ReadJob> &queue = urgent ? urgent_ : waiting_;
        // Room for all results: a lane has nobody to tell that there is no memory.
        finished_.reserve(finished_.size() + n_running_ + urgent_.size() + waiting_.size() + jobs.size());
        queue.insert(queue.end(), jobs.begin(), jobs.end());
    }
    work_.notify_all();
}

std::vector<ReadJob> Reader::settle(const void *owner, const std::vector<int32_t> &tags) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto end =
        std::stable_partition(waiting_.begin(), waiting_.end(), [&](const ReadJob &job) { return job.owner != owner; });
    std::vector<ReadJob> hurried, dropped;
    for (auto job = end; job != waiting_.end(); ++job)
        (std::binary_search(tags.begin(), tags.end(), job->tag) ? hurried : dropped).push_back(*job);
    urgent_.insert(urgent_.end(), hurried.begin(), hurried.end());
    waiting_.erase(end, waiting_.end());
    return dropped;
}

std::vector<ReadJob> Reader::drop_waiting() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<ReadJob> dropped(urgent_.begin(), urgent_.end());
    dropped.insert(dropped.end(), waiting_.begin(), waiting_.end());
    urgent_.clear();
    waiting_.clear();
    return dropped;
}

std::vector<Reader::Done> Reader::collect(bool wait) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (wait) {
        done_.wait_for(lock, LONGEST_WAIT,
                       [&] { return !finished_.empty() || (n_running_ == 0 && urgent_.empty() && waiting_.empty()); });
    }
    std::vector<Done> out;
    out.reserve(urgent_.size() + waiting_.size() + n_running_);  // of what is finished next
    out.swap(finished_);
    return out;
}

bool Reader::is_idle() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return n_running_ == 0 && urgent_.empty() && waiting_.empty() && finished_.empty();
}

uint64_t Reader::bytes_read() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return bytes_read_;
}

double Reader::busy_s() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return busy_s_ + (n_running_ > 0 ? now_s() - busy_since_ : 0.0);
}

void Reader::lane() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        work_.wait(lock, [&] { return stop_ || !urgent_.empty() || !waiting_.empty(); });
        if (stop_) return;
        std::deque<ReadJob> &queue = urgent_.empty() ? waiting_ : urgent_;
        const ReadJob job = queue.front();
        queue.pop_front();
        if (n_running_++ == 0) busy_since_ = now_s();
        lock.unlock();
        uint64_t n_read = 0;
        std::string error;
        try {
            error = read(job, n_read);
        } catch (const std::bad_alloc &) {
            error = "out of memory";  // short enough to need none
        }
        lock.lock();
        bytes_read_ += n_read;
        if (--n_running_ == 0) busy_s_ += now_s() - busy_since_;
        finished_.push_back({job.owner, job.tag, std::move(error)});
        done_.notify_all();
    }
}

std::string Reader::read(const ReadJob &job, uint64_t &n_read) const {
    const File &file = files_[static_cast<size_t>(job.file)];
    int why = direct_ ? read_direct(file.direct, job, n_read) : EINVAL;
    if (direct_ && why == 0) return "";
    // A short read, or a place that takes no direct ones after all.
    size_t got = 0;
    if (why == EINVAL || why == EOPNOTSUPP || why == ENODATA) {
        why = read_whole(file.buffered, job.to, job.n_bytes, job.offset, got);
        n_read += got;
        if (why == 0 && got == job.n_bytes) return "";
    }
    const std::string where =
        std::to_string(job.n_bytes) + " bytes at " + std::to_string(job.offset) + " of " + legible(file.path);
    if (why != 0) return "cannot read " + where + ": " + strerror(why);
    return "cannot read " + where + ": the file ends " +
           (got > 0 ? "after " + std::to_string(job.offset + got) : "before that");
}

std::string Reader::changed() const {
    for (const File &file : files_) {
        os::FileIdentity now;
        if (!os::identify(file.buffered, now)) return legible(file.path) + ": " + strerror(errno);
        const std::string what = os::difference(file.identity, now);
        if (!what.empty()) return legible(file.path) + " " + what;
    }
    return "";
}

std::string Reader::other_than(const std::vector<os::FileIdentity> &inspected) const {
    for (size_t i = 0; i < files_.size(); ++i) {
        const std::string what = os::difference(inspected[i], files_[i].identity);
        if (!what.empty()) return legible(files_[i].path) + " " + what;
    }
    return "";
}

}  // namespace bmoe
