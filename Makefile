# One command per purpose; every target does its own set-up, once. `make help` lists them.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
# The tests of sockets and hosts wait more than they compute, and each worker has to collect all of them first.
JOBS ?= $(shell echo $$((2 * $$(getconf _NPROCESSORS_ONLN))))
VENV := .venv
BIN := $(VENV)/bin
EXAMPLES_READY := $(VENV)/.examples-ready
DEV_READY := $(VENV)/.dev-ready
FRAMEWORKS_READY := $(VENV)/.frameworks-ready
BENCH_READY := $(VENV)/.bench-ready
DOCS_READY := $(VENV)/.docs-ready
MERMAID_READY := $(VENV)/.mermaid-ready
MERMAID := mermaid-11.17.2
MERMAID_SHA256 := 6ad2f42c3fc26bbf9e45cbb6d11898972573ea52b33a5f4ff51952899f950ffd

# The environment variable, unlike --constraint, also binds the isolated environments in which sources are built;
# newer versions of pip read the second one for those.
PIP := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help: # list the targets, under the headings of this file
	@sed -n -e 's/^##@ \(.*\)/|\1/p' -e 's/^\([a-z-]*\):[^#]*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | \
		while IFS='|' read -r target purpose; do \
			if [ "$$target" ]; then printf '  make %-18s%s\n' "$$target" "$$purpose"; else echo "$$purpose"; fi; done

##@ Use

.PHONY: demo
demo: $(EXAMPLES_READY) ## train on 4 ranks of this machine
	@$(BIN)/python examples/demo.py

# v2 is a command of docker, v1 one of its own.
COMPOSE ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)

.PHONY: compose-demo
compose-demo: ## train on 4 containers (needs Docker)
	$(COMPOSE) build
	trap '$(COMPOSE) down' EXIT; $(COMPOSE) up; \
		test "$$(docker wait $$($(COMPOSE) ps --all --quiet) | sort --unique)" = 0

# pip before 23.1, as in Debian 12, can make a wheel of netifaces only in an isolated environment.
.PHONY: wheels
wheels: | $(BIN)/pip ## wheels of mingle and its dependencies but torch, for a cluster without network or compiler
	PIP_USE_PEP517=1 $(PIP) wheel --quiet --no-deps --wheel-dir wheelhouse . \
		$$(sed -n -e '/^# what mingle runs on/,/^$$/p' -e '/^typing_extensions==/p' constraints.txt | grep -v -e '^#' -e '^torch==')
	@echo "on the other machines: pip install --no-index --find-links wheelhouse multinode-mingle"

##@ Test

# Compiled once and not by each worker of each run: an environment may forbid it, as that of a container often does.
export PYTHONDONTWRITEBYTECODE :=

PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations=10

# tests/support/levels.py says what runs on which level.
# One worker more: quick tests often wait. Two more: those of the lab wait for most of their time, for what comes of a fault.
.PHONY: test
test: JOBS := $(shell echo $$(($(JOBS) + 1)))
test: $(DEV_READY) ## the quick tests, in three minutes (the lab's need root, iproute2 and nftables)
	$(PYTEST) -m 'not slow' $(PYTEST_ARGS)

.PHONY: test-slow
test-slow: JOBS := $(shell echo $$(($(JOBS) + 2)))
test-slow: $(DEV_READY) ## the tests that `make test` leaves out
	$(PYTEST) -m slow $(PYTEST_ARGS)

.PHONY: test-all
test-all: ## all tests: the quick ones, then the slow ones
	$(MAKE) test
	$(MAKE) test-slow

.PHONY: soak
soak: $(DEV_READY) ## the scenarios in all their variants, seeds and schedules; takes two hours, and writes soak.log
	MINGLE_SOAK=1 $(PYTEST) -m soak --verbose --durations=0 --timeout=3600 $(PYTEST_ARGS) 2>&1 | tee --append soak.log

.PHONY: lint
lint: $(DEV_READY) ## style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: fmt
fmt: $(DEV_READY) ## format the code, and fix the style where ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Half of the time guided by coverage, where atheris can be installed.
FUZZ_SECONDS ?= 300
.PHONY: fuzz
fuzz: $(DEV_READY) ## hostile bytes for the decoders and the machines, for FUZZ_SECONDS
	PYTHONPATH=. $(BIN)/python -m tests.fuzz --seconds $$(($(FUZZ_SECONDS) / 2)) --seed $$RANDOM
	$(INSTALL) --quiet --editable '.[fuzz]'
	if $(BIN)/python -c 'import atheris' 2>/dev/null; then for target in plain-datagram signed-datagram echo local-message frames called calling; do \
		PYTHONPATH=. $(BIN)/python -m tests.fuzz --guided $$target --seconds $$(($(FUZZ_SECONDS) / 14)); done; fi

ROOM ?= wire
.PHONY: mutants
mutants: $(DEV_READY) ## which tests notice small mistakes in a room of src/mingle: make mutants ROOM=wire
	$(BIN)/python tools/mutants.py $(ROOM) $(MUTANTS_ARGS)

##@ Test beside others

.PHONY: test-compose test-launchers test-frameworks test-gpu
test-compose: $(DEV_READY) ## docker-compose.yml, and containers on three hosts (as root also without Docker)
test-launchers: $(DEV_READY) ## mpirun, mpiexec, srun, sbatch and pdsh, installed if missing (as root)
test-frameworks: $(FRAMEWORKS_READY) ## Lightning, Accelerate, FSDP2, DeepSpeed, the Trainer, JAX, MLX, Ray and torchft
test-gpu: $(FRAMEWORKS_READY) ## NCCL on hosts that share this machine's GPU (as root, with a torch for CUDA)
test-compose test-launchers test-frameworks test-gpu:
	$(BIN)/python -m pytest tests/$(@:test-%=%) --durations=0 $(PYTEST_ARGS)

.PHONY: test-torch-suite
test-torch-suite: $(FRAMEWORKS_READY) ## all of torch's own tests of torch.distributed and its RPC, over mingle://
	$(BIN)/python -m tests.frameworks.torch_suite $(SUITE_ARGS)
	$(BIN)/python -m tests.frameworks.torch_rpc_suite $(SUITE_ARGS)

# The oldest that is supported; another one: make test-torch TORCH=2.15.0. What that runs on comes in the versions that it
# asks for, and so does moto's cfn-lint, which shares sympy with it.
TORCH ?= 2.6.0
TORCH_VENV := .venv-torch-$(TORCH)

.PHONY: test-torch
test-torch: ## the tests of all that touches torch, on another one: make test-torch TORCH=2.6.0
	$(PYTHON) -m venv $(TORCH_VENV)
	sed '/^torch==/d; /^cfn-lint==/d; /^# what torch runs on/,/^$$/d' constraints.txt > $(TORCH_VENV)/constraints.txt
	PIP_CONSTRAINT=$(TORCH_VENV)/constraints.txt $(TORCH_VENV)/bin/python -m pip install \
		--disable-pip-version-check --quiet torch==$(TORCH) --editable '.[dev]'
	$(TORCH_VENV)/bin/python -m pytest -n $(JOBS) tests/unit/test_doors.py tests/unit/distributed tests/unit/elastic tests/unit/engine/test_discovery.py \
		tests/unit/engine/test_store.py tests/unit/engine/test_store_keeper.py \
		tests/lab/test_forming.py tests/lab/test_lifecycle.py tests/lab/test_agents.py tests/lab/test_torchrun.py \
		tests/lab/test_torchrun_faults.py tests/lab/test_torchrun_partitions.py $(PYTEST_ARGS)

##@ Measure

.PHONY: bench
bench: $(BENCH_READY) ## mingle beside its peers, in about an hour; keeps and draws the results (as root)
	@PYTHONPATH=src:. $(BIN)/python -m benchmarks $(BENCH_ARGS)

.PHONY: bench-guard
bench-guard: $(BENCH_READY) ## a minute of it, as in CI: is a ratio far beyond what it was?
	@PYTHONPATH=src:. $(BIN)/python -m benchmarks --guard

.PHONY: stats
stats: $(DEV_READY) ## lines, classes and constants, and what an import and one discovery cost
	@$(BIN)/python benchmarks/stats.py $(STATS_ARGS)

##@ Publish

.PHONY: docs
docs: $(DOCS_READY) $(MERMAID_READY) ## the site of the documents, in site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "site/index.html"

.PHONY: dist
dist: $(DOCS_READY) $(DEV_READY) ## sdist and wheel, checked: what an index shows, and that no file is missing
	rm -rf dist build/sdist
	PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt $(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	mkdir -p build/sdist
	tar --extract --gzip --file dist/*.tar.gz --directory build/sdist --strip-components=1
	cd build/sdist; $(CURDIR)/$(BIN)/python -m pytest -n 2 --quiet tests/unit/test_project.py tests/docs/test_docs.py \
		-k 'not (demo or ranks or print or message or torchrun)'

.PHONY: clean
clean: ## remove the environment, the caches and what was built
	rm -rf $(VENV) .venv-torch-* build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis soak.log soak.passed
	find . -type d -name __pycache__ -prune -exec rm -rf {} +

# --system-site-packages: take torch from the system's Python.
VENV_ARGS ?=

# pip is the last thing that venv installs: an environment without it was left half made.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "mingle needs Python 3.10 or newer: make PYTHON=python3.12 ...")'
	@$(PYTHON) -m venv $(VENV_ARGS) $(VENV) || { \
		echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }

# Torch is large: pip says what it downloads, and then nothing while it unpacks that.
$(EXAMPLES_READY): pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) --editable '.[examples]'
	@touch $@

$(DEV_READY): pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) --editable '.[dev]'
	@touch $@ $(EXAMPLES_READY)

$(FRAMEWORKS_READY): $(DEV_READY)
	$(INSTALL) --editable '.[dev,frameworks]'
	@touch $@

$(BENCH_READY): $(DEV_READY)
	$(INSTALL) --editable '.[dev,bench]'
	@touch $@

$(DOCS_READY): constraints.txt | $(BIN)/pip
	$(INSTALL) build hatchling mkdocs-material twine
	@touch $@

# The site's diagrams are drawn by a script in it. Where npm can't fetch that they are shown as text.
$(MERMAID_READY): | $(BIN)/pip
	@if cd $(VENV) && npm pack --silent $(subst -,@,$(MERMAID)) >/dev/null 2>&1; then \
		echo "$(MERMAID_SHA256)  $(MERMAID).tgz" | sha256sum --check --quiet; \
		tar --extract --gzip --file $(MERMAID).tgz --strip-components=2 package/dist/mermaid.min.js; \
		rm $(MERMAID).tgz; touch $(@F); \
	else echo "npm can't fetch mermaid: the diagrams are shown as text"; fi
