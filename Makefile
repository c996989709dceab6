# One line a target; CI calls these too.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
.PHONY: up test check chaos compose-test bench

$(BIN)/penstock: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[all]"
	touch $@

$(VENV)/dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

up: $(BIN)/penstock
	$(BIN)/penstock up $(ARGS)

test: $(VENV)/dev
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

chaos: $(VENV)/dev
	$(BIN)/python -m tests.chaos $(ARGS)

compose-test: $(VENV)/dev
	$(BIN)/python tests/compose/run.py

bench: $(VENV)/dev
	$(BIN)/python -m bench.pipeline
