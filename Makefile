# Everything lives in .venv and build/; llama.cpp and models in BMOE_CACHE (default ~/.cache/bmoe).
PYTHON ?= python3
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

PY_FILES := bmoe bmoe_native csrc/cmake packaging tests examples benchmarks
LIBRARY_FILES := $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h)
CXX_FILES := $(LIBRARY_FILES) $(wildcard tests/csrc/*.cpp tests/csrc/*.c tests/fuzz/*.cpp tests/fuzz/*.h \
	examples/c/*.[ch] examples/cpp/*.[ch]pp)
BUILD_INPUTS := Makefile pyproject.toml $(LIBRARY_FILES) \
	$(wildcard packaging/*.py csrc/CMakeLists.txt csrc/cmake/*.* csrc/cmake/llama/*)

NINJA := $(if $(shell command -v ninja),-G Ninja)
PREFIX ?= /usr/local

.PHONY: help demo test check lint format types cxx wheel install abi map fuzz fuzz-programs clean python sanitize-address sanitize-thread vulkan FORCE

help:
	@echo "make demo    build bmoe, fetch the default model (1.1 GB) and watch an agent decide"
	@echo "make test    lint, types, a build without warnings, every test"
	@echo "make check   the same without the slow tests and those that need a model"
	@echo "make format  lay out Python and C++"
	@echo "make wheel   a wheel for other machines, in dist/ (docs/wheels.md)"
	@echo "make install PREFIX=/usr/local    libbmoe, bmoe.h, bmoe.pc and the CMake package, for hosts that are not Python"
	@echo "make abi     write down in csrc/abi.txt what programs compiled against bmoe.h rely on"
	@echo "make map     draw the map of the code in docs/architecture.md"
	@echo "make fuzz SECONDS=20 TARGETS='open text state probe'    mutated inputs, each target for so long; needs clang"
	@echo "make sanitize-address    the tests on a build with AddressSanitizer and UBSan; TESTS=tests/device for a part"
	@echo "make sanitize-thread     those of threads, streaming and the prefill device with ThreadSanitizer"
	@echo "make vulkan  the prefill device on a build with Vulkan; Mesa's software driver will do (docs/prefill-device.md)"
	@echo "make clean   remove .venv, build/ and dist/"

demo: .venv/ready-run
	@$(BIN)/python examples/agent_demo.py

test: lint types cxx
	@$(BIN)/python -m pytest

check: lint types cxx
	@$(BIN)/python -m pytest -m "not slow and not model"

lint: .venv/ready-dev
	@$(BIN)/ruff check --quiet $(PY_FILES)
	@$(BIN)/ruff format --quiet --check $(PY_FILES) || { echo "bmoe build: layout differs; make format"; exit 1; }
	@$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: .venv/ready-dev
	@$(BIN)/ruff check --quiet --fix $(PY_FILES)
	@$(BIN)/ruff format --quiet $(PY_FILES)
	@$(BIN)/clang-format -i $(CXX_FILES)

types: .venv/ready-dev
	@$(BIN)/mypy

cxx: .venv/ready-dev
	@cmake -S csrc -B build/dev $(NINJA) -DPython3_EXECUTABLE=$(CURDIR)/$(BIN)/python \
		-DBMOE_WERROR=ON -DBMOE_BUILD_TESTS=ON -DBMOE_TEST_RPC=ON >build/dev.log || { cat build/dev.log; exit 1; }
	@cmake --build build/dev --parallel >build/dev.log || { cat build/dev.log; exit 1; }

# Left out of the whole suite: what builds libraries of its own, allocations that are made to fail, processes without a free
# descriptor, for UBSan needs one itself, a share of a CPU that is measured, and what an import of bmoe brings along, for here
# each Python is told of this library. Real models are in it with MARKS=.
MARKS ?= not model
WHOLE := tests --ignore=tests/build --ignore=tests/fuzz --ignore=tests/csrc/test_memory.py \
	-k "not descriptor and not share_a_cpu and not importing_bmoe" -m "$(MARKS)"
THREADS := tests/bmoe_native/test_threads.py tests/device tests/bmoe_native/test_streaming.py \
	tests/bmoe_native/test_hooks.py tests/gates/test_streamed.py tests/csrc/test_csrc.py::test_the_store_does_what_its_model_does
SUPPRESSED := $(CURDIR)/tests/sanitized/thread.supp
sanitize-address: SANITIZERS := address,undefined
sanitize-address: RUNTIMES := libasan.so libubsan.so
sanitize-address: TESTS ?= $(WHOLE)
sanitize-thread: SANITIZERS := thread
sanitize-thread: RUNTIMES := libtsan.so
# Of the gates a part: they take twenty times as long.
sanitize-thread: TESTS ?= $(THREADS) -k "not gates or (is_resident and 32 and moe)"
# What is read and what computes with it are threads of both.
sanitize-thread: SANITIZE_LLAMA := -DBMOE_SANITIZE_LLAMA=ON
sanitize-address sanitize-thread: .venv/ready-dev
	@cmake -S csrc -B build/$@ $(NINJA) -DPython3_EXECUTABLE=$(CURDIR)/$(BIN)/python -DCMAKE_BUILD_TYPE=RelWithDebInfo \
		-DBMOE_SANITIZE=$(SANITIZERS) $(SANITIZE_LLAMA) -DBMOE_BUILD_TESTS=ON -DBMOE_TEST_RPC=ON >build/$@.log || \
		{ cat build/$@.log; exit 1; }
	@cmake --build build/$@ --parallel >build/$@.log || { cat build/$@.log; exit 1; }
	@BMOE_TEST_BUILD=$(CURDIR)/build/$@ LD_PRELOAD="$(foreach name,$(RUNTIMES),$(shell $(CXX) -print-file-name=$(name)))" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
		TSAN_OPTIONS=halt_on_error=1:suppressions=$(SUPPRESSED) \
		$(BIN)/python -m pytest -p no:cacheprovider $(TESTS)

# The first device whatever it is: without being told, ggml passes over a driver in software.
vulkan: export BMOE_TEST_DEVICE ?= Vulkan0
vulkan: export GGML_VK_VISIBLE_DEVICES ?= 0
vulkan: export BMOE_TEST_BUILD := $(CURDIR)/build/vulkan
vulkan: .venv/ready-dev
	@cmake -S csrc -B build/vulkan $(NINJA) -DPython3_EXECUTABLE=$(CURDIR)/$(BIN)/python -DGGML_VULKAN=ON \
		>build/vulkan.log || { cat build/vulkan.log; exit 1; }
	@cmake --build build/vulkan --parallel >build/vulkan.log || { cat build/vulkan.log; exit 1; }
	@$(BIN)/python -m pytest -p no:cacheprovider -rP tests/device/test_vulkan.py $(TESTS)

wheel: python
	@$(PYTHON) packaging/portable.py dist

# No venv where cmake is there: what hosts need is no Python.
install: $(if $(shell command -v cmake),python,.venv/ready-run) | build
	@cmake -S csrc -B build/install $(NINJA) -DPython3_EXECUTABLE=$(shell command -v $(PYTHON)) -DCMAKE_INSTALL_LIBDIR=lib \
		$(CMAKE_ARGS) >build/install.log || { cat build/install.log; exit 1; }
	@cmake --build build/install --parallel >build/install.log || { cat build/install.log; exit 1; }
	@cmake --install build/install --strip --prefix "$(PREFIX)"

map:
	@$(PYTHON) packaging/architecture.py

build:
	@mkdir -p $@

abi: cxx
	@$(BIN)/python packaging/abi.py csrc/include/bmoe.h build/dev/libbmoe.so csrc/abi.txt

SECONDS ?= 20
fuzz-programs: .venv/ready-dev | build
	@CC=clang CXX=clang++ cmake -S csrc -B build/fuzz $(NINJA) -DPython3_EXECUTABLE=$(CURDIR)/$(BIN)/python \
		-DCMAKE_BUILD_TYPE=RelWithDebInfo -DBMOE_SANITIZE=address,undefined -DBMOE_BUILD_FUZZ=ON \
		-DBMOE_LLAMA_CC=$(CC) -DBMOE_LLAMA_CXX=$(CXX) >build/fuzz.log || { cat build/fuzz.log; exit 1; }
	@cmake --build build/fuzz --parallel --target fuzz-open fuzz-text fuzz-state >build/fuzz.log || \
		{ cat build/fuzz.log; exit 1; }

fuzz: fuzz-programs
	@PYTHONPATH=. $(BIN)/python tests/fuzz/run.py build/fuzz/fuzz build/fuzz-corpus $(SECONDS) $(TARGETS)

clean:
	rm -rf .venv build dist

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || \
		{ echo "bmoe build: python 3.10 or newer is needed, and $(PYTHON) is not; name one with PYTHON=..." >&2; exit 1; }

.venv/ready-run: $(BUILD_INPUTS) | python
	@$(PYTHON) packaging/devenv.py run
	@touch $@

.venv/ready-dev: $(BUILD_INPUTS) | python
	@$(PYTHON) packaging/devenv.py dev
	@touch $@ .venv/ready-run

ifneq ($(shell $(PYTHON) packaging/devenv.py healthy 2>/dev/null),yes)
.venv/ready-run .venv/ready-dev: FORCE
endif
