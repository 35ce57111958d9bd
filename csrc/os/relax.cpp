// How ggml's threads wait for one another at the end of each graph node: spin for a moment, then sleep in short naps.
// ggml alone spins for as long as it takes; with another program on the CPUs that is a scheduler's time slice per node,
// a thousand nodes a prefill. Figures: docs/decisions/0001-waiting-threads.md.
#include <chrono>
#include <thread>

extern "C" void polite_relax(void) {
    using Clock = std::chrono::steady_clock;
    // Longer than threads with CPUs of their own are apart, shorter than a time slice.
    constexpr std::chrono::microseconds spin(50);
    // Two turns further apart than this belong to two waits.
    constexpr std::chrono::microseconds gap(2);
    thread_local Clock::time_point began, last;
    const Clock::time_point now = Clock::now();
    if (now - last > gap) began = now;
    last = now;
    if (now - began < spin) {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield" ::: "memory");
#endif
        return;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(1));
    last = Clock::now();
}
