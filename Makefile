# One line a target; CI calls these too.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
.PHONY: up dev docs test check explore chaos batch-chaos browser clients compose-test redis-test proxy-test telemetry cuda-kernels hostile audit lm-eval bench

# --no-compile: Python compiles what it imports when it first does so, seconds of what a whole installation takes.
$(BIN)/penstock: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable ".[all]"
	touch $@

$(VENV)/dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable ".[dev]"
	touch $@

up: $(BIN)/penstock
	$(BIN)/penstock up $(ARGS)

# For who changes the code: everything, and the hook of pre-commit.
dev: $(VENV)/dev
	$(BIN)/pre-commit install

# What is written from the code: docs/reference/, and the contents of long pages. `mkdocs serve` shows the site.
docs: $(VENV)/dev
	$(BIN)/python -m tests.lint --write

# With ARGS, those tests only.
test: $(VENV)/dev
	$(BIN)/python -m $(if $(ARGS),pytest $(ARGS),tests)

# New examples for every property test, for some minutes: ARGS="--minutes 60".
explore: $(VENV)/dev
	$(BIN)/python -m tests.explore $(ARGS)

check: $(VENV)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python -m tests.lint
	$(BIN)/mypy

chaos: $(VENV)/dev
	$(BIN)/python -m tests.chaos $(ARGS)

batch-chaos: $(VENV)/dev
	$(BIN)/python -m tests.chaos.batches $(ARGS)

$(VENV)-clients/clients: pyproject.toml
	$(PYTHON) -m venv $(VENV)-clients
	$(VENV)-clients/bin/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	$(VENV)-clients/bin/python -m pip install --quiet --disable-pip-version-check --group clients
	touch $@

# Some clients need older versions of what we use: they have an environment of their own. Those of npm, and those that are to be the newest, are in .clients,
# which takes 5 GB. ARGS="--only codex": that one; --upgrade: newest releases of what is there; --weekly: vLLM's benchmark, too, which takes 10 GB more.
clients: $(VENV)/dev $(VENV)-clients/clients
	$(VENV)-clients/bin/python -m tests.clients $(BIN)/python $(ARGS)

# The playground in Debian's Chromium: apt install chromium chromium-driver.
browser: $(VENV)/dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "pip>=25.1"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --group browser
	$(BIN)/python -m tests.browser $(ARGS)

compose-test: $(VENV)/dev
	$(BIN)/python tests/compose/run.py

telemetry: $(VENV)/dev
	$(BIN)/python -m tests.telemetry $(ARGS)

# The CUDA backend without a GPU: every kernel in Triton's interpreter, with its errors, and compiled for Ampere, Ada and Hopper.
cuda-kernels: $(VENV)/dev
	rm -f build/gpu.json
	TRITON_INTERPRET=1 $(BIN)/python -m bench.gpu --out build $(ARGS)
	$(BIN)/python -m pytest --numprocesses auto tests/kernels/cuda/more_models.py tests/kernels/cuda/more_bench.py
	$(BIN)/python -m tests.kernels.cuda.compiled 80 89 90

# A Redis that speaks TLS only, with a user for each stage. Needs redis-server 7 or newer with TLS, and openssl.
redis-test: $(VENV)/dev
	$(BIN)/python -m tests.secure_redis

# Gateways behind nginx and Caddy, by the configurations of deploy/proxy: apt install nginx caddy. Some four minutes.
proxy-test: $(VENV)/dev
	$(BIN)/python -m tests.proxies $(ARGS)

# 10,000 malformed and hostile requests, to every route.
hostile: $(VENV)/dev
	$(BIN)/python -m tests.hostile $(ARGS)

$(VENV)-audit/audit: pyproject.toml
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	$(VENV)-audit/bin/python -m pip install --quiet --disable-pip-version-check --group audit
	touch $@

# The licence of each package that is installed, and what is known against it (for which PyPI is asked).
audit: $(VENV)/dev $(VENV)-audit/audit
	$(VENV)-audit/bin/pip-licenses --python $(BIN)/python --from=mixed --order=license
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+.*//' > $(VENV)-audit/installed.txt
	$(VENV)-audit/bin/pip-audit --strict --disable-pip --no-deps --requirement $(VENV)-audit/installed.txt

# Loglikelihoods by lm-eval, through a pipeline and by transformers. Installs what it needs beside dev's.
lm-eval: $(VENV)/dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable ".[lm-eval]"
	$(BIN)/python -m tests.lm_eval $(ARGS)

bench: $(VENV)/dev
	$(BIN)/python -m bench.pipeline
