# One target for each task of a developer; `make` alone lists them. Each makes the virtual environment that it needs.

PYTHON ?= python3
VENV   ?= .venv
# The number of test processes, for two cores: many tests wait for a lease or a process to end. Others run meanwhile.
JOBS   ?= 5
ARGS   ?=
# How often `make test-steady` runs the tests: without other load, and beside as many busy processes as there are cores.
RUNS      ?= 10
BUSY_RUNS ?= 5

# Unset: with this variable Python keeps no compiled files, and every test process would compile everything again.
export PYTHONDONTWRITEBYTECODE :=

BIN    := $(VENV)/bin
CODE   := $(wildcard src tests benchmarks examples)
SHARED := -n $(JOBS) --dist loadgroup

# Stamp files. If one is newer than pyproject.toml, its set of dependencies is installed.
CORE   := $(VENV)/.core
DEV    := $(VENV)/.dev
BENCH  := $(VENV)/.bench

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test test-steady check format-check lint types layers bench soak soak-ci map format clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(CORE) ## Kill a running flow and watch it come back
	$(BIN)/relight demo $(ARGS)

test: $(DEV) ## Run the tests in JOBS (5) processes; ARGS="-k name" narrows
	$(BIN)/python -m pytest $(SHARED) $(ARGS)

test-steady: $(DEV) ## Run the tests RUNS (10) times, and BUSY_RUNS (5) times beside two busy processes; print a table
	$(BIN)/python -m tests.steady --runs $(RUNS) --busy-runs $(BUSY_RUNS) -- $(SHARED) $(ARGS)

check: format-check lint types layers test ## Format, lint, strict types, import layers, tests

format-check: $(DEV)
	$(BIN)/ruff format --check .

lint: $(DEV)
	$(BIN)/ruff check .

types: $(DEV)
	$(BIN)/mypy $(CODE)

layers: $(DEV)
	$(BIN)/lint-imports

bench: $(BENCH) ## Measure Relight beside similar libraries and the bare databases
	$(BIN)/python -m benchmarks $(ARGS)

soak-ci: $(DEV) ## Run the long tests that are the same every time (tests/seeds.txt), as CI does after `make check`
	$(BIN)/python -m pytest $(SHARED) -m "soak_ci and not soak" $(ARGS)

soak: $(DEV) ## Run all long tests, for hours: every crash point, many kills, many runs, new seeds
	$(BIN)/python -m pytest -m "soak or soak_ci" --timeout 0 $(ARGS)

map: $(DEV) ## Draw the packages and their imports into docs/ARCHITECTURE.md
	$(BIN)/python -m tests.docs.package_map

format: $(DEV) ## Format the code and apply the safe fixes of the linter
	$(BIN)/ruff check --fix-only --exit-zero .
	$(BIN)/ruff format .

clean: ## Remove everything that make, the tests and the builds have made
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests $(wildcard benchmarks examples) -name __pycache__ -type d -prune -exec rm -rf {} +

# venv installs pip last. Without pip the environment is incomplete or missing, so it is made again from the beginning.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Relight needs Python 3.11 or newer and $(PYTHON) is not: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)

$(CORE): pyproject.toml | $(BIN)/pip
	$(BIN)/pip install --quiet --editable '.[cli]'
	@touch $@

$(DEV): pyproject.toml | $(BIN)/pip
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

$(BENCH): pyproject.toml | $(BIN)/pip
	$(BIN)/pip install --quiet --editable '.[bench]'
	@touch $@
