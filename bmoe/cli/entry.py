"""Where the command begins: before the imports, which take long enough to be interrupted."""

INTERRUPTED = 130


def main() -> int:
    """bmoe.cli.app's main(); an interrupt that it cannot catch itself is an exit code too."""
    try:
        from bmoe.cli.app import main as run

        return run()
    except KeyboardInterrupt:
        return INTERRUPTED
