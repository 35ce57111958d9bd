"""A library put before the C library in which reads fail: FAULT in the environment says how."""

import os
import subprocess
from pathlib import Path

SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>
static int n_calls;
static int fails(void) {
    const char *fault = getenv("FAULT");
    if (!fault) return 0;
    const int call = __sync_fetch_and_add(&n_calls, 1);
    errno = !strcmp(fault, "eintr") && call % 2 ? EINTR : !strcmp(fault, "eio") && call == 9 ? EIO : 0;
    return errno != 0;
}
ssize_t pread(int file, void *to, size_t n, off_t offset) {
    ssize_t (*real)(int, void *, size_t, off_t) = (ssize_t (*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread");
    const char *fault = getenv("FAULT");
    if (fails()) return -1;
    if (fault && !strncmp(fault, "at", 2) && offset <= atol(fault + 2) && atol(fault + 2) < offset + (off_t)n) {
        errno = EIO;
        return -1;
    }
    return real(file, to, fault && !strcmp(fault, "short") && n > 4096 ? n / 2 : n, offset);
}
ssize_t preadv(int file, const struct iovec *parts, int n_parts, off_t offset) {
    ssize_t (*real)(int, const struct iovec *, int, off_t) =
        (ssize_t (*)(int, const struct iovec *, int, off_t))dlsym(RTLD_NEXT, "preadv");
    const char *fault = getenv("FAULT");
    if (fault && !strcmp(fault, "einval")) { errno = EINVAL; return -1; }
    if (fault && !strcmp(fault, "dead")) { errno = EIO; return -1; }
    if (fault && !strcmp(fault, "slow")) usleep(200000);
    if (fails()) return -1;
    return real(file, parts, fault && !strcmp(fault, "short") ? 1 : n_parts, offset);
}
"""


def built(folder: Path) -> Path:
    """The library, written into a folder."""
    (folder / "shim.c").write_text(SHIM)
    library = folder / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "shim.c", "-ldl"], check=True)
    return library


def preloaded(shim: Path) -> dict[str, str]:
    """The environment with it; what is preloaded already, a sanitizer, has to be the first."""
    return {**os.environ, "LD_PRELOAD": f"{os.environ.get('LD_PRELOAD', '')} {shim}".lstrip()}
