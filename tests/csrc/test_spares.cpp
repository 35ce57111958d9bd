// SparePages as a program: prints what is wrong, and nothing where nothing is.
#include <sys/mman.h>

#include <cstdio>
#include <cstring>

#include "experts/spares.h"

namespace {

constexpr size_t PAGE = 4096, N_PLACES = 40000;
char *range = nullptr;

uintptr_t place(size_t index) { return reinterpret_cast<uintptr_t>(range + 4 * PAGE * index); }
char &first_byte(size_t index) { return range[4 * PAGE * index]; }

bool is_there(size_t index) {
    unsigned char pages[4] = {0};
    return mincore(range + 4 * PAGE * index, PAGE, pages) == 0 && (pages[0] & 1);
}

void fill(size_t index, size_t n_pages, char with) { memset(&first_byte(index), with, n_pages * PAGE); }

void expect(bool is_so, const char *what) {
    if (!is_so) printf("wrong: %s\n", what);
}

}  // namespace

int main() {
    range = static_cast<char *>(
        mmap(nullptr, N_PLACES * 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    bmoe::SparePages spares;
    fill(0, 2, 'a');
    spares.put(place(0), 2 * PAGE);
    spares.move_to(place(1), 2 * PAGE);
    expect(!is_there(0) && is_there(1) && first_byte(1) == 'a', "pages are moved, not made");

    spares.put(place(1), 2 * PAGE);
    spares.move_to(place(1), 2 * PAGE);  // its own
    fill(1, 2, 'b');
    spares.move_to(place(2), 2 * PAGE);
    expect(is_there(1) && first_byte(1) == 'b' && !is_there(2), "what was taken back is not given to another");

    fill(3, 3, 'c');
    spares.put(place(3), 3 * PAGE);
    spares.move_to(place(4), 2 * PAGE);
    expect(first_byte(4) == 'c' && !is_there(3), "one page more will do, and none is left over");
    spares.put(place(4), 2 * PAGE);
    spares.move_to(place(5), 3 * PAGE);
    expect(is_there(5) && first_byte(5) == 'c', "one page less will do");
    spares.put(place(5), 3 * PAGE);
    spares.move_to(place(6), PAGE);
    expect(!is_there(6) && is_there(5), "two pages more will not");
    spares.drop();
    expect(!is_there(5), "what is dropped is the kernel's");
    spares.move_to(place(6), 3 * PAGE);
    expect(!is_there(6), "what was dropped is not moved");

    // More places than a process may have mappings: the rest is left to the kernel, which must still give memory.
    size_t n_moved = 0;
    for (size_t i = 0; i + 1 < N_PLACES; i += 2) {
        fill(i, 1, 'd');
        spares.put(place(i), PAGE);
        spares.move_to(place(i + 1), PAGE);
        n_moved += is_there(i + 1);
        spares.drop();
    }
    expect(n_moved > 1000 && n_moved < N_PLACES / 2 - 1, "so many places are moved to and no more");
    void *more = mmap(nullptr, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    expect(more != MAP_FAILED, "mappings are left for others");
    munmap(range, N_PLACES * 4 * PAGE);
    return 0;
}
