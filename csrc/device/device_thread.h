// A thread for everything that talks to a device. Where a device is lost, its backend ends the process or waits for an answer
// for ever; here that costs this thread alone.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>

namespace bmoe {

class DeviceThread {
  public:
    // Throws Error (BMOE_E_MEMORY).
    DeviceThread();
    ~DeviceThread();
    DeviceThread(const DeviceThread &) = delete;
    DeviceThread &operator=(const DeviceThread &) = delete;

    // Run the body there and wait for it; from there, just run it. Throws what it throws, and Error (BMOE_E_INTERNAL) where the
    // device is lost: the body may go on then, so what it uses is its own or is never freed, and this object neither.
    void run(std::function<void()> body);
    // Why it is not to be talked to again; empty while it is there.
    std::string lost() const;

    struct State;

  private:
    std::shared_ptr<State> state_;
    std::thread thread_;
};

// Of this thread, or null. Threads that work for a device thread join it, and run no hooks: what fails there counts as its
// failing.
std::shared_ptr<DeviceThread::State> current_device_thread();
void join_device_thread(std::shared_ptr<DeviceThread::State> state);

// Run a hook of the host on the thread that called bmoe, or not at all where it has left a device that is lost. On any other
// thread than a device's: here.
void on_caller(const std::function<void()> &hook);

// An assertion failed. Where it is a device's, that is lost, and this does not return.
void lose_device(const char *message);
// Thrown while this thread asked its device: where it is neither an Error nor want of memory, the device is lost.
void lose_device(const std::exception &thrown);

}  // namespace bmoe
