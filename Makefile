# Two commands do all the set-up: `make example` and `make test`.
# PYTHON is the interpreter to build the environment with: `make test PYTHON=python3.12`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= auto
INSTALLED := $(VENV)/.installed

.PHONY: example test test-all lint baselines benchmark clean

example: $(INSTALLED)  ## the example suite, on virtual GPUs
	$(BIN)/python -m pytest example_suite

test: lint example  ## lint, types, the example suite and every test but the slow sweeps
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses=4 -m "not slow"

test-all: lint example  ## the slow sweeps too
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses=4

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

baselines: $(INSTALLED)  ## store the example suite's figures anew: read the diff before you commit it
	$(BIN)/python -m pytest example_suite --gpumem-update-baselines

benchmark: $(INSTALLED)
	$(BIN)/python benchmarks/overhead.py

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
