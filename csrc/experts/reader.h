// Positioned reads of expert slices on lanes, urgent ones first.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "os/identity.h"

namespace bmoe {

// A range of a file and where it goes.
struct ReadJob {
    int32_t file = 0;
    uint64_t offset = 0;
    uint8_t *to = nullptr;  // congruent with the offset modulo Reader::BLOCK
    size_t n_bytes = 0;
    const void *owner = nullptr;  // what is told when the job is done
    int32_t tag = 0;
};

class Reader {
  public:
    static constexpr size_t BLOCK = 4096;
    static constexpr size_t MAX_REQUEST = 4 << 20;  // of a job: several lanes share a long range

    struct Done {
        const void *owner;
        int32_t tag;
        std::string error;  // empty: all of it was read
    };

    // Throws Error (BMOE_E_MODEL) where a file cannot be opened.
    //   n_lanes  threads that read
    //   direct   past the page cache where the file allows it
    Reader(const std::vector<std::string> &paths, int32_t n_lanes, bool direct);
    ~Reader();  // what runs is waited for, what waits is dropped
    Reader(const Reader &) = delete;
    Reader &operator=(const Reader &) = delete;

    void submit(const std::vector<ReadJob> &jobs, bool urgent);
    // Of the jobs of an owner that wait, make those with one of these tags (rising) urgent, and drop the others; the jobs
    // dropped.
    std::vector<ReadJob> settle(const void *owner, const std::vector<int32_t> &tags);
    // Drop everything that waits; the jobs dropped.
    std::vector<ReadJob> drop_waiting();
    // What is done since the last call. With wait, waits for something where there is something to wait for, 20 ms at most.
    std::vector<Done> collect(bool wait);

    // One job on the calling thread, whichever lanes there are. Empty, or what went wrong; adds to n_read what was asked of
    // the kernel.
    std::string read(const ReadJob &job, uint64_t &n_read) const;
    // Nothing waits, is being read, or is left to be collected.
    bool is_idle();
    // What runs is waited for, what waits is dropped, and nothing is read any more.
    void stop();

    bool is_direct() const { return direct_; }
    uint64_t bytes_read();  // asked of the kernel, blocks included
    double busy_s();        // seconds in which at least one lane was reading

    // Empty, or what has become of a file since it was opened: cut or written to.
    std::string changed() const;
    // Empty, or which of the files is another than the one that was inspected, in the order of the paths.
    std::string other_than(const std::vector<os::FileIdentity> &inspected) const;

  private:
    struct File {
        std::string path;
        int direct = -1;
        int buffered = -1;
        os::FileIdentity identity;
    };
    void lane();
    void close_files();

    std::vector<File> files_;
    bool direct_;
    std::mutex mutex_;
    std::condition_variable work_, done_;
    std::deque<ReadJob> urgent_, waiting_;
    std::vector<Done> finished_;
    size_t n_running_ = 0;
    uint64_t bytes_read_ = 0;
    double busy_s_ = 0.0, busy_since_ = 0.0;
    bool stop_ = false;
    std::vector<std::thread> lanes_;
};

}  // namespace bmoe
