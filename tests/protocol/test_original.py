"""bmoe-cli: the original's flags."""

import csv
import json
from pathlib import Path

import pytest

from tests.protocol.fake import answers
from tests.protocol.host import ORIGINAL, decide, run


def test_its_flags_start_a_session(moe: Path) -> None:
    flags = ["-m", str(moe), "--chatml", "--moe-stream", "--session", "--decide", "--decide-prefix-cache=off"]
    flags += ["-t", "1", "-c=512", "--ubatch", "64", "--io-threads", "3", "--cache-mb=100", "--cache-mb", "0"]
    flags += ["--prefill-min-tokens=32", "--progress"]
    done = run(*ORIGINAL, *flags, data=json.dumps(decide(1)).encode())
    assert done.returncode == 0
    parsed = [(tag, record) for tag, record in answers(done.stdout) if tag != "LOAD"]
    assert [tag for tag, _ in parsed] == ["READY", "BEGIN", "DECIDE"]
    assert parsed[0][1]["n_ctx"] == 512
    assert parsed[2][1]["prefill_read_mib"] > 0
    said = [line for line in done.stderr.decode().splitlines() if "file system refuses" not in line]
    assert len(said) == 4
    assert said[0].startswith("bmoe-cli: --chatml ")
    assert said[1] == "bmoe session: --prefill-min-tokens does nothing without --prefill-device"
    assert "experts in 3 layers are streamed; cache: 0 MiB; " in said[2]
    assert "by 3 threads" in said[2]
    assert "MiB read, 0 % in memory" in said[3]


def test_a_device_that_is_not_there_leaves_prefill_on_the_cpu(model: Path) -> None:
    flags = ["-m", str(model), "--session", "--decide", "--chatml", "-c", "512", "--decide-prefix-cache", "on"]
    device = ["--prefill-device=npu", "--prefill-min-tokens=16", "--prefill-loaders", "1"]
    without, done = (run(*ORIGINAL, *flags, *more, data=json.dumps(decide(1)).encode()) for more in ([], device))
    assert (without.returncode, done.returncode) == (0, 0)
    said = [line for line in done.stderr.decode().splitlines() if "prefill" in line]
    assert len(said) == 1 and said[0].startswith("bmoe session: prefill runs on the CPU: there is no device npu here")
    asked, parsed = (dict(answers(one.stdout)) for one in (without, done))
    assert parsed["READY"]["prefill_device"] == "" and parsed["DECIDE"]["prefill_dev_tokens"] == 0
    assert parsed["DECIDE"]["choice_logp"] == asked["DECIDE"]["choice_logp"]


def test_fewer_experts_and_their_trace(moe: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    flags = ["-m", str(moe), "--session", "--decide", "-c", "512", "--moe-stream", "--dense-weights=anon"]
    done = run(*ORIGINAL, *flags, "--n-expert-used=1", f"--route-trace={trace}", data=json.dumps(decide(1)).encode())
    assert done.returncode == 0
    parsed = {tag: record for tag, record in answers(done.stdout)}
    assert parsed["READY"]["n_expert_used"] == 1
    with trace.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["slot"] for row in rows} == {"0"}
    assert sum(int(row["bytes"]) for row in rows) == parsed["DECIDE"]["prefill_routed_mib"] * 2**20 > 0


def test_more_experts_than_the_model_has(moe: Path) -> None:
    done = run(*ORIGINAL, "-m", str(moe), "--session", "--n-expert-used", "1000")
    assert done.returncode == 2
    tag, record = answers(done.stdout)[-1]
    assert (tag, record["id"], record["fatal"]) == ("ERROR", None, True)
    assert "1000" in record["msg"]
    assert record["msg"] in done.stderr.decode()


def test_a_model_without_experts_is_not_streamed(model: Path) -> None:
    done = run(*ORIGINAL, "-m", str(model), "--session", "--moe-stream")
    assert done.returncode == 0
    assert [tag for tag, _ in answers(done.stdout)][-1] == "READY"
    assert "this model has no routed experts: nothing is streamed, all of it is in memory" in done.stderr.decode()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-m x.gguf", "only session mode exists"),
        ("--session", "-m MODEL is missing"),
        ("-m x.gguf --session --prefill-device RPC:127.0.0.1:50052", "is an endpoint of ggml's RPC"),
        ("-m x.gguf --session --prefill-device=rpc:localhost:1", "is an endpoint of ggml's RPC"),
        ("-m x.gguf --session --prefill-device=gpu --prefill-min-tokens=1", "prefill_min_tokens is 1"),
        ("-m x.gguf --session --prefill-device", "--prefill-device needs a value"),
        ("-m x.gguf --session --prefill-min-tokens wide", "--prefill-min-tokens"),
        ("-m x.gguf --session --prefill-loaders=65", "--prefill-loaders"),
        ("-m x.gguf --session --decide-probe /nowhere/p", "--decide-probe: cannot write /nowhere/p"),
        ("-m x.gguf --session --n-expert-used few", "--n-expert-used"),
        ("-m x.gguf --session --route-trace /nowhere/t.csv", "--route-trace: cannot write /nowhere/t.csv"),
        ("-m x.gguf --session --moe-stream --dense-weights ram", "--dense-weights must be one of mmap, anon"),
        ("-m x.gguf --session --decide=yes", "--decide takes no value"),
        ("-m x.gguf --session -t", "-t needs a value"),
        ("-m x.gguf --session prompt", "'prompt' is unknown"),
        ("-m x.gguf --session -t many", "-t"),
        ("-m x.gguf --session --moe-stream --cache-mb -1", "--cache-mb must be auto or a whole number"),
        ("-m x.gguf --session --moe-stream --prefetch all", "--prefetch must be one of off, previous, router, both"),
    ],
)
def test_what_it_refuses(arguments: str, message: str) -> None:
    done = run(*ORIGINAL, *arguments.split())
    assert done.returncode == 2
    ((tag, record),) = answers(done.stdout)
    assert (tag, record["fatal"]) == ("ERROR", True)
    assert message in record["msg"]
    assert message in done.stderr.decode()


def test_help() -> None:
    for arguments in ([], ["--help"]):
        done = run(*ORIGINAL, *arguments)
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.startswith(b"usage: bmoe-cli")
