# `make help` lists the targets; CI calls them, too.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Every stage and every test process imports torch: Python shall compile its modules once.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help up dev docs test check verify bench

help:  ## lists the targets, and the suites of verify
	@sed -n 's/^\([a-z]*\):.*##  *\(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16
	@$(PYTHON) tests/verify.py

# --no-compile: Python compiles modules when it first imports them, which saves seconds of an installation.
$(BIN)/penstock: pyproject.toml
	@echo "Installing Penstock into $(VENV): this takes minutes, and some 3 GB if torch's CPU build is not there"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile --editable ".[all]"
	touch $@

$(VENV)/dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable ".[dev]"
	touch $@

up: $(BIN)/penstock  ## fetches a small model and serves it; ARGS are those of `penstock up`
	$(BIN)/penstock up $(ARGS)

dev: $(VENV)/dev  ## installs everything for development, and the pre-commit hook
	$(BIN)/pre-commit install

# docs/reference/, and the contents of long pages. `mkdocs serve` shows the site.
docs: $(VENV)/dev  ## writes the generated pages
	$(BIN)/python -m tests.lint --write

test: $(VENV)/dev  ## runs the tests: real Redis, real processes, real HTTP; ARGS are those of pytest, or --once-more
	$(BIN)/python -m tests $(ARGS)

check: $(VENV)/dev  ## checks the files: format, lint, import contracts, types, pages
	$(BIN)/python tests/check.py

verify: $(VENV)/dev  ## runs a further suite, SUITE=NAME ARGS="..."; lists the suites without a name
	@$(BIN)/python tests/verify.py "$(SUITE)" '$(ARGS)'

bench: $(VENV)/dev  ## measures the cost of the pipeline itself
	$(BIN)/python -m bench.pipeline
