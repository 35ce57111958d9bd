"""Where the command begins: before the imports, which take long enough to be interrupted."""

import signal

INTERRUPTED = 130


def main() -> int:
    """bmoe.cli.app's main(); an interrupt that it cannot catch itself is an exit code too."""
    try:
        from bmoe.cli.app import main as run

        code = run()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    if code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the code is known: Python's own end would let one more kill us
    return code
