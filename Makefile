# Everything a developer runs. The first target makes .venv with whatever Python 3.11 or newer is found.
#
#   make demo                          train a small Llama on the standard library's source, a few minutes
#   make test PYTEST_ARGS="-k carry"   the tests
#   make test-long                     more cases, which `make test` leaves out
#   make test-older                    the tests with the older versions of requirements-older.txt, in .venv-older
#   make test-contract                 only the tests that hold what the library promises, row by row (tests/contract)
#   make lint                          ruff and mypy
#   make docs                          the documentation's site, into build/docs; broken links and missing texts fail
#   make bench                         overhead and compile time, as JSON in benchmarks/results

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INTEGRATIONS := $(VENV)/.integrations
PYTEST_ARGS ?=
# Processes that share the test files.
TEST_JOBS ?= 2
DEMO_ARGS ?=

# One thread per operator: the workers are threads themselves, and small operators gain nothing from more.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_OFFLINE ?= 1

.PHONY: help demo test test-long test-older test-contract lint format docs bench clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

# A candidate counts if it runs, is new enough and can make environments.
$(BIN)/python:
	@for python in python3 python3.13 python3.12 python3.11 python; do \
	  if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    echo "making $(VENV) with $$($$python --version)"; exec $$python -m venv $(VENV); \
	  fi; \
	done; \
	echo "make: no Python 3.11 or newer with venv found (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1

# An environment made by other means has no stamp: pip then finds the pins met and only links the package.
$(INSTALLED): requirements-dev.txt pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

$(INTEGRATIONS): requirements-integrations.txt $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-integrations.txt
	@touch $@

demo: $(INSTALLED)
	OMP_NUM_THREADS=$${DEMO_THREADS:-1} $(BIN)/python examples/finetune_llm.py $(DEMO_ARGS)

# Tests start dozens of processes. Where Python is told to write no bytecode, each would compile the package for a second.
test: $(INTEGRATIONS)
	$(BIN)/python -m compileall -q roundpipe
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --max-worker-restart 0 $(PYTEST_ARGS)

test-long: $(INTEGRATIONS)
	$(BIN)/python -m pytest -m long -n $(TEST_JOBS) --dist load --max-worker-restart 0 $(PYTEST_ARGS)

test-older: requirements-older.txt
	$(MAKE) --no-print-directory VENV=.venv-older .venv-older/.installed
	.venv-older/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-older.txt
	.venv-older/bin/python -m pytest -n $(TEST_JOBS) --dist loadfile --max-worker-restart 0 $(PYTEST_ARGS)

test-contract: $(INSTALLED)
	$(BIN)/python -m pytest $$($(BIN)/python -m tests.contract) $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --fresh-env --quiet docs build/docs

bench: $(INSTALLED)
	$(BIN)/python benchmarks/overhead.py --json benchmarks/results/overhead.json
	$(BIN)/python benchmarks/compile_time.py --json benchmarks/results/compile_time.json

clean:
	rm -rf $(INSTALLED) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
