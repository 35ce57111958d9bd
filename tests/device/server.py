"""A device for tests: a process that serves ggml's RPC on this machine's loopback, in front of its CPU."""

import os
import socket
import subprocess
import time
from pathlib import Path

BUILD = os.environ.get("BMOE_TEST_BUILD") or Path(__file__).resolve().parents[2] / "build" / "dev"
PROGRAM = Path(BUILD, "tests", "rpc_server")


class Server:
    def __init__(self, n_threads: int = 1) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]
        self._process = subprocess.Popen([PROGRAM, str(self._port), str(n_threads)], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while not self._listens():
            assert self._process.poll() is None and time.monotonic() < deadline, "the server does not start"
            time.sleep(0.02)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def name(self, faults: str = "") -> str:
        """What Engine.open() takes for this device; faults as in csrc/device/test_rpc.h."""
        return f"RPC:127.0.0.1:{self._port}" + (f"?{faults}" if faults else "")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
