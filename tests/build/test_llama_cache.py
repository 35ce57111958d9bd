"""What the cache may be trusted with: what is in it is whole, and was built for this compiler and CPU."""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

from tests.build.conftest import TREE, Llama, load_llama, write_tree

CONSUMER = """
cmake_minimum_required(VERSION 3.18)
project(consumer C)
include("${TARGETS}")
file(WRITE main.c "#include <llama.h>\\nint main(void) { return llama_answer() - 42; }\\n")
add_executable(consumer main.c)
target_link_libraries(consumer PRIVATE llama)
"""


def answers(targets: Path, folder: Path) -> bool:
    """Whether a program that is linked through the file that llama.py names runs."""
    folder.mkdir()
    (folder / "CMakeLists.txt").write_text(CONSUMER)
    commands = (["cmake", "-S", ".", "-B", "b", f"-DTARGETS={targets}"], ["cmake", "--build", "b"], ["b/consumer"])
    return all(subprocess.run(command, cwd=folder, capture_output=True).returncode == 0 for command in commands)


def wait_for(path: Path) -> int:
    """The process id written there, once it is."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            return int(path.read_text())
        time.sleep(0.02)
    raise AssertionError(f"{path} was not written")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_stdout_is_the_path_and_the_second_time_is_silent(llama: Llama, tmp_path: Path) -> None:
    first = llama.run()
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"{llama.complete()[0]}\n"
    assert "configuring llama.cpp" in first.stderr
    second = llama.run()
    assert (second.stdout, second.stderr) == (first.stdout, "")
    assert answers(llama.complete()[0], tmp_path / "consumer")


def test_only_what_is_needed_is_kept(llama: Llama) -> None:
    kept = llama.build().parent
    assert sorted(path.name for path in kept.rglob("*")) == ["inputs.json", "lib", "libllama.a", "llama.cmake"]
    assert not llama.unfinished()


def test_two_at_once_build_once(llama: Llama, tmp_path: Path) -> None:
    env = {"FAKE_SLEEP_S": "2", "FAKE_PID_FILE": str(tmp_path / "pid")}
    first = llama.start(env=env)
    wait_for(tmp_path / "pid")
    second = llama.start(env=env)
    (first_path, first_said), (second_path, second_said) = first.communicate(timeout=60), second.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0)
    assert first_path == second_path
    assert "built llama.cpp" in first_said
    assert "waiting for another build" in second_said
    assert "built llama.cpp" not in second_said


def test_a_killed_build_leaves_nothing_that_counts(llama: Llama, tmp_path: Path) -> None:
    process = llama.start(env={"FAKE_SLEEP_S": "60", "FAKE_PID_FILE": str(tmp_path / "pid")})
    sleeper = wait_for(tmp_path / "pid")
    process.kill()
    process.communicate()
    os.kill(sleeper, signal.SIGKILL)
    assert llama.unfinished()
    assert not llama.complete()
    assert answers(llama.build(), tmp_path / "consumer")
    assert not llama.unfinished()


def test_a_stopped_build_takes_its_compilers_with_it(llama: Llama, tmp_path: Path) -> None:
    process = llama.start(env={"FAKE_SLEEP_S": "60", "FAKE_PID_FILE": str(tmp_path / "pid")})
    sleeper = wait_for(tmp_path / "pid")
    process.terminate()
    _, said = process.communicate(timeout=10)
    assert said.endswith("bmoe build: stopped by SIGTERM\n")
    assert process.returncode == 128 + signal.SIGTERM
    assert not is_alive(sleeper)
    assert not llama.unfinished()


def test_another_cpu_gets_another_build_only_if_native(llama: Llama, tmp_path: Path) -> None:
    compiler = tmp_path / "cxx"
    compiler.write_text(
        '#!/bin/sh\nfor arg; do test "$arg" = -dM && echo "#define CPU $FAKE_CPU" && exit; done\nexec c++ "$@"\n'
    )
    compiler.chmod(0o755)
    llama.env |= {"CXX": str(compiler), "FAKE_CPU": "old"}
    native, moved = llama.build(), llama.build("--native", "OFF")
    llama.env["FAKE_CPU"] = "new"
    assert llama.build() != native
    assert llama.build("--native", "OFF") == moved


def test_flags_and_sources_are_part_of_the_key(llama: Llama) -> None:
    plain = llama.build()
    with_rpc = llama.build("--define", "GGML_RPC=ON")
    (llama.tree / "src" / "llama.c").write_text(TREE["src/llama.c"] + "\n")
    assert len({plain, with_rpc, llama.build()}) == 3


def test_what_a_backend_links_to_is_found_again(llama: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "DriverConfig.cmake").write_text("add_library(Driver::Driver INTERFACE IMPORTED)\n")
    found = f'find_package(Driver REQUIRED PATHS "{package}")\nadd_library(CUDA::cudart INTERFACE IMPORTED)\n'
    recipe, text = llama.tree / "CMakeLists.txt", TREE["CMakeLists.txt"]
    recipe.write_text(f"{text}{found}target_link_libraries(llama PRIVATE Driver::Driver CUDA::cudart)\n")
    assert "find_package(CUDAToolkit REQUIRED)" in llama.build().read_text()
    recipe.write_text(f"{text}{found}target_link_libraries(llama PRIVATE Driver::Driver)\n")
    monkeypatch.setenv("Driver_DIR", str(package))
    assert answers(llama.build(), tmp_path / "consumer")


def test_the_environment_does_not_reach_ggml(llama: Llama) -> None:
    llama.env["SOURCE_DATE_EPOCH"] = "0"
    assert llama.build().is_file()


def test_make_builds_it_where_there_is_no_ninja(llama: Llama, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("ar", "as", "c++", "cc", "cmake", "ld", "make", "ranlib", "rm", "sh"):
        (tools / name).symlink_to(shutil.which(name) or f"/nowhere/{name}")
    llama.env |= {"PATH": str(tools), "CMAKE_GENERATOR": "Ninja"}
    assert answers(llama.build(), tmp_path / "consumer")


def test_the_pinned_tree_may_be_carried_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_llama()
    sdist = tmp_path / "sdist.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(write_tree(tmp_path / "tree"), "llama_cpp_python-0/vendor/llama.cpp")
        archive.addfile(tarfile.TarInfo("llama_cpp_python-0/vendor/llama.cpp/docs/big"), io.BytesIO())
    monkeypatch.setattr(module, "PIN_SHA256", module.hashlib.sha256(sdist.read_bytes()).hexdigest())
    built: Path = module.ensure_llama(tmp_path / "here", sdist=sdist)
    assert not list((tmp_path / "here").rglob("docs"))
    shutil.move(tmp_path / "here", tmp_path / "there")
    monkeypatch.setattr(module, "compile_tree", lambda *_: pytest.fail("built again"))
    carried: Path = module.ensure_llama(tmp_path / "there")
    assert carried == tmp_path / "there" / built.relative_to(tmp_path / "here")
    assert answers(carried, tmp_path / "consumer")
