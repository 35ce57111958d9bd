// Are experts read more quickly by threads with pread, or by one thread with io_uring?
//
//     cc -O2 -std=c11 -pthread -o reads benchmarks/reads.c && ./reads FILE
//
// FILE, larger than all caches on the way to the drive, is cut into requests that are read in one random order, past the
// page cache. The two sides take turns at the next part of it and begin in turn, so that neither reads what the other
// has just read: each request comes up again only after all the others. Memory is either the same all the time, or
// given back before each request and so faulted in by the read, as the engine's is. CPU seconds are those of the
// process, its kernel threads for io_uring included.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef ROUNDS  // a test has fewer of less
#define ROUNDS 15
#define PART_MIB 128
#endif
enum { MAX_DEPTH = 16, BLOCK = 4096 };

static int file;
static size_t request_bytes, n_requests;
static uint32_t *order;  // of the file's requests
static bool is_fresh;    // memory is given back before each request
static uint8_t *memory[MAX_DEPTH];
static atomic_size_t next, end;  // the part that is being read, in places of the order

static void die(const char *what, int why) {
    fprintf(stderr, "reads: %s%s%s\n", what, why ? ": " : "", why ? strerror(why) : "");
    exit(1);
}

static off_t offset_of(size_t place) { return (off_t)order[place % n_requests] * (off_t)request_bytes; }

static uint8_t *target(size_t slot) {
    if (is_fresh) madvise(memory[slot], request_bytes, MADV_DONTNEED);
    return memory[slot];
}

// Threads with pread.

static void *lane(void *slot) {
    for (size_t place; (place = atomic_fetch_add(&next, 1)) < end;) {
        const ssize_t n = pread(file, target((size_t)(uintptr_t)slot), request_bytes, offset_of(place));
        if (n != (ssize_t)request_bytes) die("pread", n < 0 ? errno : EIO);
    }
    return NULL;
}

static void read_by_threads(unsigned depth) {
    pthread_t threads[MAX_DEPTH];
    for (unsigned i = 0; i < depth; ++i) {
        const int why = pthread_create(&threads[i], NULL, lane, (void *)(uintptr_t)i);
        if (why) die("pthread_create", why);
    }
    for (unsigned i = 0; i < depth; ++i) pthread_join(threads[i], NULL);
}

// One thread with io_uring, through system calls alone.

static struct {
    int fd;
    unsigned *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
} ring;

static void *mapped(size_t n_bytes, off_t what) {
    void *at = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring.fd, what);
    if (at == MAP_FAILED) die("mmap of a ring", errno);
    return at;
}

static void open_ring(void) {
    struct io_uring_params p = {0};
    ring.fd = (int)syscall(SYS_io_uring_setup, MAX_DEPTH, &p);
    if (ring.fd < 0) {
        const char *hint = errno == EPERM || errno == EACCES ? ", it is not permitted here" : "";
        printf("io_uring_setup: %s%s\n", strerror(errno), hint);
        exit(3);
    }
    uint8_t *sq = mapped(p.sq_off.array + p.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
    uint8_t *cq = mapped(p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe), IORING_OFF_CQ_RING);
    ring.sq_tail = (unsigned *)(sq + p.sq_off.tail);
    ring.sq_mask = (unsigned *)(sq + p.sq_off.ring_mask);
    ring.sq_array = (unsigned *)(sq + p.sq_off.array);
    ring.cq_head = (unsigned *)(cq + p.cq_off.head);
    ring.cq_tail = (unsigned *)(cq + p.cq_off.tail);
    ring.cq_mask = (unsigned *)(cq + p.cq_off.ring_mask);
    ring.cqes = (struct io_uring_cqe *)(cq + p.cq_off.cqes);
    ring.sqes = mapped(p.sq_entries * sizeof(struct io_uring_sqe), IORING_OFF_SQES);
}

static void queue(size_t slot, size_t place) {
    const unsigned tail = *ring.sq_tail, index = tail & *ring.sq_mask;
    ring.sqes[index] = (struct io_uring_sqe){
        .opcode = IORING_OP_READ,
        .fd = file,
        .addr = (uint64_t)(uintptr_t)target(slot),
        .len = (uint32_t)request_bytes,
        .off = (uint64_t)offset_of(place),
        .user_data = slot,
    };
    ring.sq_array[index] = index;
    __atomic_store_n(ring.sq_tail, tail + 1, __ATOMIC_RELEASE);
}

static void read_by_ring(unsigned depth) {
    unsigned n_queued = 0, n_flying = 0;
    for (; n_queued < depth && next < end; ++n_queued) queue(n_queued, next++);
    while (n_queued + n_flying > 0) {
        const long n = syscall(SYS_io_uring_enter, ring.fd, n_queued, 1, IORING_ENTER_GETEVENTS, NULL, 0);
        if (n < 0 && errno != EINTR) die("io_uring_enter", errno);
        if (n > 0) n_queued -= (unsigned)n, n_flying += (unsigned)n;
        unsigned head = *ring.cq_head;
        for (; head != __atomic_load_n(ring.cq_tail, __ATOMIC_ACQUIRE); ++head) {
            const struct io_uring_cqe *done = &ring.cqes[head & *ring.cq_mask];
            if (done->res != (int)request_bytes) die("a read by io_uring", done->res < 0 ? -done->res : EIO);
            const size_t slot = (size_t)done->user_data;
            --n_flying;
            if (next < end) queue(slot, next++), ++n_queued;
        }
        __atomic_store_n(ring.cq_head, head, __ATOMIC_RELEASE);
    }
}

// Both in turn.

typedef struct {
    double wall_s, cpu_s;
} spent;

static double cpu_s(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
           1e-6 * (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
}

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static spent timed(void (*read_part)(unsigned), unsigned depth, size_t n) {
    end = next + n;
    const size_t stop = end;
    const double wall = now_s(), cpu = cpu_s();
    read_part(depth);
    const spent took = {now_s() - wall, cpu_s() - cpu};
    next = stop;  // threads count past it
    return took;
}

static int rising(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(const double *values) {
    double sorted[ROUNDS];
    memcpy(sorted, values, sizeof sorted);
    qsort(sorted, ROUNDS, sizeof *sorted, rising);
    return sorted[ROUNDS / 2];
}

static void compare(unsigned depth, size_t n) {
    double speed[2][ROUNDS], cpu[2] = {0, 0}, ratio[ROUNDS], low = 1e9, high = 0;
    const double part_bytes = (double)(n * request_bytes);
    for (int round = 0; round < ROUNDS; ++round) {
        for (int turn = 0; turn < 2; ++turn) {
            const int side = (round + turn) % 2;
            const spent took = timed(side ? read_by_ring : read_by_threads, depth, n);
            speed[side][round] = part_bytes / took.wall_s / 1e6;
            cpu[side] += took.cpu_s / (part_bytes * ROUNDS / 1e9);
        }
        ratio[round] = speed[1][round] / speed[0][round];
        low = ratio[round] < low ? ratio[round] : low;
        high = ratio[round] > high ? ratio[round] : high;
    }
    printf("| %.1f | %s | %u | %.0f | %.0f | %.2f (%.2f-%.2f) | %.3f | %.3f |\n", (double)request_bytes / (1 << 20),
           is_fresh ? "fresh" : "kept", depth, median(speed[0]), median(speed[1]), median(ratio), low, high, cpu[0],
           cpu[1]);
    fflush(stdout);
}

static void shuffle(void) {
    uint64_t state = 88172645463325252U;
    for (size_t i = 0; i < n_requests; ++i) order[i] = (uint32_t)i;
    for (size_t i = n_requests - 1; i > 0; --i) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        const size_t j = (size_t)(state % (i + 1));
        const uint32_t kept = order[i];
        order[i] = order[j], order[j] = kept;
    }
}

int main(int argc, char **argv) {
    static const size_t sizes[] = {308 * BLOCK, 4 << 20};  // 1.2 MiB, about what a slice has; and the longest request
    static const unsigned depths[] = {1, 2, 4, 8, MAX_DEPTH};
    struct stat status;
    if (argc != 2) die("usage: reads FILE", 0);
    if ((file = open(argv[1], O_RDONLY | O_DIRECT)) < 0 || fstat(file, &status) < 0) die(argv[1], errno);
    open_ring();
    puts("| MiB | memory | N | threads MB/s | io_uring MB/s | ratio | threads CPU s/GB | io_uring CPU s/GB |");
    puts("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |");
    for (size_t s = 0; s < 2; ++s) {
        request_bytes = sizes[s];
        n_requests = (size_t)status.st_size / request_bytes;
        if (n_requests < MAX_DEPTH) die("the file is too small", 0);
        order = realloc(order, n_requests * sizeof *order);
        if (!order) die("memory", ENOMEM);
        shuffle();
        next = 0;
        for (size_t i = 0; i < MAX_DEPTH; ++i) {
            memory[i] = mmap(NULL, request_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (memory[i] == MAP_FAILED) die("memory", errno);
            madvise(memory[i], request_bytes, MADV_NOHUGEPAGE);  // as the engine does
            memset(memory[i], 1, request_bytes);
        }
        for (int fresh = 0; fresh < 2; ++fresh) {
            is_fresh = fresh;
            for (size_t d = 0; d < 5; ++d) compare(depths[d], ((size_t)PART_MIB << 20) / request_bytes);
        }
    }
    return 0;
}
