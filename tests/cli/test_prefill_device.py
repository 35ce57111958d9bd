"""The flags of a prefill device: what arrives, what is refused, what is said; and the list of devices."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from bmoe_native.errors import LibraryError
from bmoe_native.types import Device
from tests.cli.conftest import Terminal
from tests.cli.test_experts import CHAT, DECIDE, GENERATE, MIB, PERPLEXITY
from tests.fakes import INFO, ScriptedEngine

OPENED = dataclasses.replace(INFO, prefill_device="Vulkan0", prefill_device_bytes=769 * MIB, repack=False)
WHY = "there is no device Vulkan0 here (devices: none)"
NOT_THERE = dataclasses.replace(INFO, prefill_device_why=WHY)
UNFIT = dataclasses.replace(
    INFO,
    prefill_device_why="the device Vulkan0 cannot be used for this model: it has no room for two layers",
    repack=False,
)
PROBE = ("probe", *DECIDE[1:])
FLAGS = ("--prefill-device", "Vulkan0")


@pytest.mark.parametrize("command", [DECIDE, GENERATE, PERPLEXITY, CHAT, PROBE])
class TestEveryCommand:
    @pytest.fixture(autouse=True)
    def _nothing_is_typed(self, typed: Callable[[bytes], None]) -> None:
        typed(b"hello\n")

    @staticmethod
    def arrived(bmoe: Terminal) -> list[object]:
        return [bmoe.opened[-1][1][f"prefill_{name}"] for name in ("device", "min_tokens", "loaders")]

    def run(self, bmoe: Terminal, *argv: str) -> int:
        """A probe needs hooks, which a scripted engine has none of: what it opens is all that is asked of it."""
        if argv[0] == "probe":
            bmoe.on_open = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
            assert bmoe(*argv) == 130
            return 0
        return bmoe(*argv)

    def test_without_flags_there_is_none(self, bmoe: Terminal, command: tuple[str, ...]) -> None:
        assert self.run(bmoe, *command) == 0
        assert self.arrived(bmoe) == ["", 0, 0]

    def test_the_flags_arrive(self, bmoe: Terminal, command: tuple[str, ...]) -> None:
        bmoe.engine = ScriptedEngine(info=OPENED)
        assert self.run(bmoe, *command, *FLAGS, "--prefill-min-tokens", "64", "--prefill-loaders", "4") == 0
        assert self.arrived(bmoe) == ["Vulkan0", 64, 4]
        assert "do nothing" not in bmoe.err and "prefill" not in bmoe.err

    def test_flags_without_a_device_are_said_once(self, bmoe: Terminal, command: tuple[str, ...]) -> None:
        flags = ("--prefill-min-tokens", "1", "--prefill-loaders", "0")
        assert self.run(bmoe, *command, *flags) == 0
        said = [line for line in bmoe.err.splitlines() if "prefill" in line]
        assert said == ["bmoe: --prefill-min-tokens and --prefill-loaders do nothing without --prefill-device"]
        assert self.run(bmoe, *command, *flags[:2]) == 0
        assert "bmoe: --prefill-min-tokens does nothing without --prefill-device\n" in bmoe.err

    @pytest.mark.parametrize(
        ("flags", "says"),
        [
            (("--prefill-device", "RPC:127.0.0.1:50052"), "'RPC:127.0.0.1:50052' is an endpoint of ggml's RPC"),
            (("--prefill-device=rpc:localhost:1",), "'rpc:localhost:1' is an endpoint of ggml's RPC"),
            ((*FLAGS, "--prefill-min-tokens", "1"), "prefill_min_tokens is 1"),
            ((*FLAGS, "--prefill-min-tokens", "-1"), "--prefill-min-tokens"),
            ((*FLAGS, "--prefill-min-tokens", "65537"), "--prefill-min-tokens"),
            ((*FLAGS, "--prefill-loaders", "65"), "--prefill-loaders"),
        ],
    )
    def test_what_is_refused_before_anything_is_opened(
        self, bmoe: Terminal, command: tuple[str, ...], flags: tuple[str, ...], says: str
    ) -> None:
        assert bmoe(*command, *flags) == 2
        assert says in bmoe.err and not bmoe.opened and not bmoe.fetched


class TestWhatIsSaid:
    @pytest.mark.parametrize("command", [DECIDE, GENERATE, PERPLEXITY, CHAT])
    def test_a_device_that_is_not_there_is_said_once(
        self, bmoe: Terminal, command: tuple[str, ...], typed: Callable[[bytes], None]
    ) -> None:
        typed(b"hello\nand again\n")
        bmoe.engine = ScriptedEngine(info=NOT_THERE)
        assert bmoe(*command, *FLAGS) == 0
        said = [line for line in bmoe.err.splitlines() if "prefill" in line]
        assert said == [f"bmoe: prefill runs on the CPU: {WHY}"]

    def test_what_runs_there_with_verbose_only(self, bmoe: Terminal) -> None:
        bmoe.engine = ScriptedEngine(info=OPENED)
        assert bmoe(*DECIDE, *FLAGS) == 0
        assert bmoe.err == ""
        assert bmoe(*DECIDE, *FLAGS, "--prefill-min-tokens", "0", "--verbose") == 0
        assert bmoe.err == (
            "bmoe: pieces of 32 tokens and more are computed on Vulkan0, of whose memory two layers take 769 MiB\n"
        )

    def test_a_prefix_cache_is_refused_with_a_device_that_opened(self, bmoe: Terminal) -> None:
        bmoe.engine = ScriptedEngine(info=OPENED)
        assert bmoe(*DECIDE, *FLAGS, "--prefix-cache", "on") == 2
        assert bmoe.err.startswith("bmoe: prefix_cache on cannot be had with the prefill device Vulkan0: ")
        bmoe.engine = ScriptedEngine(info=NOT_THERE)
        assert bmoe(*DECIDE, *FLAGS, "--prefix-cache", "on") == 0

    def test_what_was_computed_there_is_in_the_view_and_in_json(self, bmoe: Terminal) -> None:
        bmoe.engine = ScriptedEngine(info=OPENED)
        bmoe.engine.reads = {"dev_tokens": 64, "dev_read_bytes": 7 * MIB, "dev_stall_s": 0.5, "dev_nodes": 50}
        bmoe.engine.reads |= {"dev_routed": 9, "dev_demand": 4}
        told = {"prefill_dev_tokens": 64, "prefill_dev_read_mib": 7.0, "prefill_dev_stall_s": 0.5}
        told |= {"prefill_dev_routed": 9, "prefill_dev_demand": 4, "prefill_dev_nodes": 50}
        for command in (DECIDE, GENERATE):
            assert bmoe(*command, *FLAGS, "--json") == 0
            assert told.items() <= bmoe.json().items()
        assert bmoe(*PERPLEXITY, *FLAGS, "--json") == 0
        assert set(told) < set(bmoe.json()) and bmoe.json()["prefill_dev_nodes"] == 50
        assert bmoe(*DECIDE, *FLAGS) == 0
        assert " tokens, 64 on the device, " in bmoe.out and bmoe.out.endswith(" s, 7.0 MiB read\n")
        assert bmoe(*PERPLEXITY, *FLAGS) == 0
        assert " tokens computed, 64 on the device in " in bmoe.out and bmoe.out.endswith(" s, 7.0 MiB read\n")
        bmoe.is_terminal = True
        assert bmoe(*GENERATE, *FLAGS) == 0
        assert " tokens read, 64 on the device in " in bmoe.err and "7.0 MiB of experts from the file" in bmoe.err


class TestBatch:
    LINES = ('{"prefix":"p","suffix":"s","choices":["A","B"]}', '{"prefix":"p","suffix":"t","choices":["A","B"]}')

    @pytest.fixture
    def argv(self, tmp_path: Path) -> tuple[str, ...]:
        (tmp_path / "r.jsonl").write_text("\n".join(self.LINES))
        return (*DECIDE[:3], "--batch", str(tmp_path / "r.jsonl"), "--out", str(tmp_path / "o.jsonl"))

    def test_what_a_device_computed_is_continued_with_it_alone(self, bmoe: Terminal, argv: tuple[str, ...]) -> None:
        bmoe.engine = ScriptedEngine(info=OPENED)
        assert bmoe(*argv, *FLAGS) == 0
        for flags in (("--prefill-min-tokens", "32"), ("--prefill-loaders", "4"), ("--no-repack",)):
            assert bmoe(*argv, *FLAGS, *flags) == 0
            assert "2 of them by an earlier run" in bmoe.err
            assert bmoe.engine.closed
        assert bmoe(*argv, *FLAGS, "--prefill-min-tokens", "64") == 2
        for info, others in ((INFO, ()), (NOT_THERE, FLAGS), (UNFIT, FLAGS)):
            bmoe.engine = ScriptedEngine(info=info)
            assert bmoe(*argv, *others) == 2
            assert "--restart" in bmoe.err
        bmoe.engine = ScriptedEngine(info=dataclasses.replace(OPENED, prefill_device="CUDA0"))
        assert bmoe(*argv, "--prefill-device", "CUDA0") == 2

    def test_one_that_is_not_there_changes_no_batch(self, bmoe: Terminal, argv: tuple[str, ...]) -> None:
        assert bmoe(*argv) == 0
        bmoe.engine = ScriptedEngine(info=NOT_THERE)
        assert bmoe(*argv, *FLAGS) == 0
        assert "2 of them by an earlier run" in bmoe.err
        bmoe.engine = ScriptedEngine(info=OPENED)
        assert bmoe(*argv, *FLAGS) == 2

    def test_one_that_does_not_fit_leaves_weights_as_they_lie_in_the_file(
        self, bmoe: Terminal, argv: tuple[str, ...]
    ) -> None:
        bmoe.engine = ScriptedEngine(info=UNFIT)
        assert bmoe(*argv, *FLAGS) == 0
        bmoe.engine = ScriptedEngine()
        assert bmoe(*argv, "--no-repack") == 0
        assert "2 of them by an earlier run" in bmoe.err
        assert bmoe(*argv) == 2


class TestDevices:
    CPU = Device(name="CPU", description="Some processor", free_bytes=3 * MIB, total_bytes=4 * MIB, type="cpu")
    GPU = Device(name="Vulkan0", description="A \x1b[31mcard", free_bytes=0, total_bytes=0, type="igpu")

    def test_a_line_for_each(self, bmoe: Terminal) -> None:
        bmoe.devices = lambda: [self.CPU, self.GPU]
        assert bmoe("devices") == 0
        assert [line.rstrip() for line in bmoe.out.splitlines()] == [
            "CPU      cpu   3 of 4 MiB free  Some processor",
            r"Vulkan0  igpu   memory unknown  A \x1b[31mcard",
        ]
        assert bmoe.err == ""

    def test_json(self, bmoe: Terminal) -> None:
        bmoe.devices = lambda: [self.CPU, self.GPU]
        assert bmoe("devices", "--json") == 0
        first, second = bmoe.json()["devices"]
        assert first == {**dataclasses.asdict(self.CPU), "is_prefill": False}
        assert second == {**dataclasses.asdict(self.GPU), "is_prefill": True}

    def test_none_that_can_be_one_is_said(self, bmoe: Terminal) -> None:
        bmoe.devices = lambda: [self.CPU]
        assert bmoe("devices") == 0
        assert bmoe.err.startswith("bmoe: none of them can be a --prefill-device: ")

    def test_without_a_library(self, bmoe: Terminal) -> None:
        def fail() -> list[Device]:
            raise LibraryError("libbmoe is not there")

        bmoe.devices = fail
        assert bmoe("devices") == 1
        assert bmoe.err == "bmoe: libbmoe is not there\n"
