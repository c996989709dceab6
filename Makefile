# `make help` lists what there is; CI calls these too.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
.PHONY: help up dev docs test check verify bench

help:  ## lists the targets, and the suites of verify
	@sed -n 's/^\([a-z]*\):.*##  *\(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16
	@$(PYTHON) tests/verify.py

# --no-compile: Python compiles what it imports when it first does so, seconds of what a whole installation takes.
$(BIN)/penstock: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable ".[all]"
	touch $@

$(VENV)/dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable ".[dev]"
	touch $@

up: $(BIN)/penstock  ## serves the demo model; ARGS are those of `penstock up`
	$(BIN)/penstock up $(ARGS)

dev: $(VENV)/dev  ## installs everything for who changes the code, and the hook of pre-commit
	$(BIN)/pre-commit install

# docs/reference/, and the contents of long pages. `mkdocs serve` shows the site.
docs: $(VENV)/dev  ## writes the pages that are written from the code
	$(BIN)/python -m tests.lint --write

test: $(VENV)/dev  ## runs the tests: real Redis, real processes, real HTTP; with ARGS, those of pytest
	$(BIN)/python -m $(if $(ARGS),pytest $(ARGS),tests)

check: $(VENV)/dev  ## looks at the files: format, lint, import contracts, types, what pages say
	$(BIN)/python tests/check.py

verify: $(VENV)/dev  ## runs a suite beside the tests, SUITE=NAME ARGS="..."; lists them without a name
	@$(BIN)/python tests/verify.py "$(SUITE)" '$(ARGS)'

bench: $(VENV)/dev  ## measures what the pipeline itself costs
	$(BIN)/python -m bench.pipeline
