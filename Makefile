# One command per purpose; every target does its own set-up, once. `make help` lists them.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
EXAMPLES_READY := $(VENV)/.examples-ready
DEV_READY := $(VENV)/.dev-ready

# The environment variable, unlike --constraint, also binds the isolated environments in which sources are built;
# newer versions of pip read the second one for those.
INSTALL := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	$(BIN)/python -m pip install --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r target purpose; do \
		printf '  make %-8s %s\n' "$$target" "$$purpose"; done

.PHONY: demo
demo: $(EXAMPLES_READY) ## train on 4 ranks of this machine that were told no address
	@$(BIN)/python examples/demo.py

.PHONY: test
test: $(DEV_READY) ## run the tests (those of the lab need root, iproute2 and nftables)
	$(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

.PHONY: soak
soak: $(DEV_READY) ## repeat the scenarios as often as the promises count; the log is soak.log
	MINGLE_SOAK=1 $(BIN)/python -m pytest -n $(JOBS) -m soak --verbose --durations=0 --timeout=3600 $(PYTEST_ARGS) \
		2>&1 | tee soak.log

# v2 is a command of docker, v1 one of its own.
COMPOSE ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)

.PHONY: compose-demo
compose-demo: ## train on 4 containers that were told neither an address nor a rank (needs Docker)
	$(COMPOSE) build
	trap '$(COMPOSE) down' EXIT; $(COMPOSE) up; \
		test "$$(docker wait $$($(COMPOSE) ps --all --quiet) | sort --unique)" = 0

.PHONY: test-compose
test-compose: $(DEV_READY) ## run docker-compose.yml for real, as root also where no Docker runs
	$(BIN)/python -m pytest tests/compose --durations=0 $(PYTEST_ARGS)

# Half of the time guided by coverage, where atheris can be installed.
FUZZ_SECONDS ?= 300
.PHONY: fuzz
fuzz: $(DEV_READY) ## give hostile bytes to the decoders and the machines for FUZZ_SECONDS
	PYTHONPATH=. $(BIN)/python -m tests.fuzz --seconds $$(($(FUZZ_SECONDS) / 2)) --seed $$RANDOM
	$(INSTALL) --editable '.[fuzz]'
	if $(BIN)/python -c 'import atheris' 2>/dev/null; then for target in plain-datagram signed-datagram frames called calling; do \
		PYTHONPATH=. $(BIN)/python -m tests.fuzz --guided $$target --seconds $$(($(FUZZ_SECONDS) / 10)); done; fi

.PHONY: bench
bench: $(DEV_READY) ## measure how long 8 hosts take from rank 0's start to GO (needs root, like the lab)
	@PYTHONPATH=. $(BIN)/python -m benchmarks.last_rank

.PHONY: lint
lint: $(DEV_READY) ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: fmt
fmt: $(DEV_READY) ## mend style and format where that can be done without thinking
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: clean
clean: ## remove the environment, the caches and what was built
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis soak.log
	find . -type d -name __pycache__ -prune -exec rm -rf {} +

# pip is the last thing that venv installs: an environment without it was left half made.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit( \
		f"{sys.executable} is Python {sys.version.split()[0]}; mingle needs 3.10 or newer: make PYTHON=python3.12 ...")'
	@$(PYTHON) -m venv $(VENV) || { \
		echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }

$(EXAMPLES_READY): pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing into $(VENV): the first time this takes a few minutes"
	$(INSTALL) --editable '.[examples]'
	@touch $@

$(DEV_READY): pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing into $(VENV): the first time this takes a few minutes"
	$(INSTALL) --editable '.[dev]'
	@touch $@ $(EXAMPLES_READY)
