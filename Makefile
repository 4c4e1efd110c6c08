# make demo | test | check:  .venv (made when missing, refreshed when this file or pyproject.toml changes)  ->  the command
# make test-cuda:            .venv-cuda, with torch's CUDA build over a stand-in for its runtime (tests/cuda_stand_in/)
# make test-torch:           .venv-torch-VERSION, with that torch
# make gpu | memcheck:       no .venv; this checkout and the machine's own python3, torch and cupy
#
# Needs make and Python 3.11 or newer, nothing else. `make` alone lists what there is.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CUDA_VENV := .venv-cuda
CUDA_STAMP := $(CUDA_VENV)/.installed
STAND_IN := tests/cuda_stand_in

# The torch that is installed: the one place where it is pinned. A machine with a GPU takes the newest build for it.
CUDA = $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
TORCH ?= $(if $(CUDA),torch>=2.11,torch==2.13.0)
EXTRAS ?= $(if $(CUDA),[dev$(comma)cuda],[dev])
comma := ,

# Which tests `make test` runs, as a pytest marker expression; more arguments for pytest or the demo; the share of the thorough tests that
# one night runs: seven nights run all.
MARKERS ?= not slow and not ci and not gpu and not thorough
PYTEST_ARGS ?=
SHARE ?= $(shell date +%u)/7
ARGS ?=

# Processes that the tests are shared among: one for each core, and no more than what 24 GiB of memory are enough for.
# (nproc tells what OMP_NUM_THREADS says where that is set, which is about the threads of one process.)
CORES := $(shell unset OMP_NUM_THREADS; nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
WORKERS ?= $(shell n=$(CORES); [ $$n -gt 8 ] && n=8; echo $$n)
# Each process begins with a part of the files, so that what a file's tests share is made once, and ends with others' rest.
SHARED = -n $(WORKERS) --dist worksteal

# Files whose tests run on the stand-in once more, with the helpers.
NATIVE_ON_CUDA = $(addprefix tests/test_,hooks.py late_errors.py odd_uses.py threads.py plan_session.py step_loop.py \
                 in_place.py native_loop.py)

# What another torch is tested with: the suites that compare bits with plain PyTorch, and the programs of the documents.
EXACT = $(addprefix tests/test_,plain_models.py in_place.py odd_uses.py uncovered_bytes.py save_on_cpu.py shared_storages.py \
    recompute_exact.py random_programs.py recorder_company.py selective_checkpoints.py other_offloading.py compile.py import.py \
    readme.py)
TORCH_VENV = .venv-$(subst ==,-,$(TORCH))

# Interpreters that `make release` builds C++ helpers with: each has a torch of its own.
HELPERS_OF ?= $(BIN)/python $(wildcard $(CUDA_VENV)/bin/python .venv-torch-*/bin/python)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-slow test-thorough test-native test-cuda test-torch check format gpu memcheck docs gallery release nightly clean distclean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP) ## Train a small GPT with swapping, without, and in plain PyTorch, and compare (ARGS="--steps 5")
	@$(BIN)/python -m chameleon_mm demo $(ARGS)

test: $(STAMP) ## Run the tests that need no GPU and no patience (PYTEST_ARGS="-k pool")
	@$(BIN)/python -m pytest $(SHARED) -m "$(MARKERS)" $(PYTEST_ARGS)

test-slow: $(STAMP) ## Run those that `make test` leaves out
	@$(BIN)/python -m pytest $(SHARED) -m "(slow or ci) and not gpu and not thorough" $(PYTEST_ARGS) || [ $$? -eq 5 ] # 5: PYTEST_ARGS left none to run

test-thorough: $(STAMP) $(CUDA_STAMP) ## Run what the others sample, whole: operators in all dtypes, random programs by the hundred, each single fault (hours)
	@$(BIN)/python -m pytest $(SHARED) -m "thorough and not gpu" $(PYTEST_ARGS) || [ $$? -eq 5 ]
	@$(CUDA_VENV)/bin/python -m tests.cuda_stand_in.run --thorough $(SHARED) $(PYTEST_ARGS)

test-cuda: $(CUDA_STAMP) ## Run the tests marked gpu on torch's CUDA build, without a GPU (PYTEST_ARGS="tests/test_swapping.py")
	@$(CUDA_VENV)/bin/python -m tests.cuda_stand_in.run $(SHARED) $(PYTEST_ARGS)

test-native: $(CUDA_STAMP) ## Run tests of the hooks with the C++ helpers, which are compiled first
	@$(CUDA_VENV)/bin/python -m pytest --native $(SHARED) -m "gpu and not thorough" $(NATIVE_ON_CUDA) $(PYTEST_ARGS)

test-torch: ## Run the tests of exactness with another torch, in an environment of its own (TORCH=torch==2.14.1)
	@$(MAKE) --no-print-directory VENV=$(TORCH_VENV) MARKERS="not gpu and not thorough" PYTEST_ARGS="$(EXACT) $(PYTEST_ARGS)" test

check: $(STAMP) ## Lint, formatting, types, layers, prose
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	@$(BIN)/python -m tests.prose

format: $(STAMP) ## Format the sources, and fix what lint can fix
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

gpu: ## Tests and the figures of docs/measure.md on a CUDA machine, at most 8 minutes; JSON into OUT (bench/results)
	-@$(PYTHON) -m chameleon_mm native # all at once; without a compiler the suite runs without helpers, and says so
	@$(PYTHON) -m chameleon_mm.bench.gpu_suite --out "$${OUT:-bench/results}"

memcheck: ## The kernels' tests under NVIDIA's compute-sanitizer; without torch's cache an access beyond a tensor is seen
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no --padding 32768 --error-exitcode 86 \
	    $(PYTHON) -m pytest -m "gpu and not slow" tests/test_kernels_*.py

docs: $(STAMP) ## Build the documentation's site into build/site; a warning, such as a dead link, is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

gallery: $(STAMP) ## Train six small models under `run` on a simulated GPU, and show them on the site's page docs/gallery.md
	@$(BIN)/python -m tests.gallery

nightly: $(STAMP) $(CUDA_STAMP) ## Test with the newest torch, then a seventh of what is thorough, by the weekday, then the site's links (SHARE=1/1: all)
	@rm -rf .venv-torch-newest; failed=; \
	for part in "test-torch TORCH=torch TORCH_VENV=.venv-torch-newest" "test-thorough PYTEST_ARGS=--share=$(SHARE)" docs; do \
	    echo "== make $$part"; $(MAKE) --no-print-directory $$part || failed="$$failed [$$part]"; \
	done; [ -z "$$failed" ] || { echo "nightly: failed:$$failed" >&2; exit 1; }

release: $(STAMP) ## Build sdist, wheel and wheels of helpers into dist/, check and install them, list the fields that wait
	@$(BIN)/python -m tests.release $(HELPERS_OF)

clean: ## Remove what builds and tools leave behind
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find bench chameleon_mm kernels tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## ... and .venv, .venv-cuda and those of test-torch
	rm -rf $(VENV) $(CUDA_VENV) .venv-torch-*

# torch first: asking for it together with the rest would let the rest choose its version.
$(STAMP): pyproject.toml Makefile
	@command -v "$(PYTHON)" >/dev/null || { \
	    echo "make: expected Python 3.11 or newer as '$(PYTHON)', found no such command; say where it is: make PYTHON=/path/to/python3" >&2; \
	    exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "make: expected Python 3.11 or newer, got $$("$(PYTHON)" --version 2>&1); name a newer one: make PYTHON=python3.12" >&2; \
	    exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "make: $(PYTHON) has no venv module; install your system's package for it (Debian and Ubuntu: python3-venv)" >&2; \
	    exit 1; }
	@echo "Setting up $(VENV) with $(TORCH): minutes the first time, seconds after that."
	@"$(PYTHON)" -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".$(EXTRAS)"
	@touch $@

# Made from nothing when what it is made of changes; the tests and the operators are taken from the checkout as they are.
$(CUDA_STAMP): pyproject.toml $(STAND_IN)/versions.py $(STAND_IN)/install.py $(STAND_IN)/build.py $(wildcard $(STAND_IN)/runtime/*)
	@command -v "$(PYTHON)" >/dev/null || { \
	    echo "make: expected Python 3.11 or newer as '$(PYTHON)', found no such command; say where it is: make PYTHON=/path/to/python3" >&2; \
	    exit 1; }
	@echo "Setting up $(CUDA_VENV) with torch's CUDA build: minutes the first time, 3 GB."
	@"$(PYTHON)" -m tests.cuda_stand_in.install $(CUDA_VENV)
	@touch $@
