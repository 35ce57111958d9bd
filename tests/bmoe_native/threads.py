"""What tests of threads share: a body in eight of them, which begin at once, and 200 calls in each."""

import threading
from collections.abc import Callable

N_THREADS, N_CALLS = 8, 200


def in_threads(body: Callable[[int], None]) -> None:
    """Run the body in each thread, with the thread's number, and raise what the first one raised."""
    failures: list[BaseException] = []
    begin = threading.Barrier(N_THREADS)

    def guarded(number: int) -> None:
        try:
            begin.wait()
            body(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(N_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
