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
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r target purpose; do \
		printf '  make %-16s %s\n' "$$target" "$$purpose"; done

.PHONY: demo
demo: $(EXAMPLES_READY) ## train on 4 ranks of this machine that were told no address
	@$(BIN)/python examples/demo.py

# Compiled once and not by each worker of each run: an environment may forbid it, as that of a container often does.
export PYTHONDONTWRITEBYTECODE :=

PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations=10

# tests/support/levels.py says what runs on which level.
# One worker more: quick tests often wait. The slow ones are full of deadlines, and more of them at once would miss some.
.PHONY: test
test: JOBS := $(shell echo $$(($(JOBS) + 1)))
test: $(DEV_READY) ## run the quick tests, in three minutes (those of the lab need root, iproute2 and nftables)
	$(PYTEST) -m 'not slow' $(PYTEST_ARGS)

.PHONY: test-slow
test-slow: $(DEV_READY) ## run the tests that `make test` leaves out
	$(PYTEST) -m slow $(PYTEST_ARGS)

.PHONY: test-all
test-all: ## run all tests: the quick ones, then the slow ones
	$(MAKE) test
	$(MAKE) test-slow

.PHONY: soak
soak: $(DEV_READY) ## repeat the scenarios as often as the promises count; the log is soak.log
	MINGLE_SOAK=1 $(PYTEST) -m soak --verbose --durations=0 --timeout=3600 $(PYTEST_ARGS) 2>&1 | tee --append soak.log

ROOM ?= wire
.PHONY: mutants
mutants: $(DEV_READY) ## which tests notice small mistakes in a room of src/mingle, and which never do: make mutants ROOM=wire
	$(BIN)/python tools/mutants.py $(ROOM) $(MUTANTS_ARGS)

# v2 is a command of docker, v1 one of its own.
COMPOSE ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)

.PHONY: compose-demo
compose-demo: ## train on 4 containers that were told neither an address nor a rank (needs Docker)
	$(COMPOSE) build
	trap '$(COMPOSE) down' EXIT; $(COMPOSE) up; \
		test "$$(docker wait $$($(COMPOSE) ps --all --quiet) | sort --unique)" = 0

.PHONY: test-compose
test-compose: $(DEV_READY) ## run docker-compose.yml, and containers on three hosts, for real; as root also where no Docker runs
	$(BIN)/python -m pytest tests/compose --durations=0 $(PYTEST_ARGS)

.PHONY: test-launchers
test-launchers: $(DEV_READY) ## start the example by mpirun, mpiexec, srun, sbatch and pdsh, installed if missing (as root)
	$(BIN)/python -m pytest tests/launchers --durations=0 $(PYTEST_ARGS)

.PHONY: test-frameworks
test-frameworks: $(FRAMEWORKS_READY) ## train with Lightning, Accelerate, FSDP2, DeepSpeed and the Trainer on top of mingle; JAX, MLX, Ray and torchft by mingle-run
	$(BIN)/python -m pytest tests/frameworks --durations=0 $(PYTEST_ARGS)

.PHONY: test-gpu
test-gpu: $(FRAMEWORKS_READY) ## train with NCCL on hosts of the lab that share this machine's GPU (as root, with a torch for CUDA)
	$(BIN)/python -m pytest tests/gpu --durations=0 $(PYTEST_ARGS)

.PHONY: test-torch-suite
test-torch-suite: $(FRAMEWORKS_READY) ## run all of torch's own tests of torch.distributed over mingle://, with Gloo; of them 30 are in test-frameworks
	$(BIN)/python -m tests.frameworks.torch_suite $(SUITE_ARGS)

.PHONY: test-torch-rpc-suite
test-torch-rpc-suite: $(FRAMEWORKS_READY) ## run all of torch's own tests of its RPC over mingle://, with TensorPipe; of them 12 are in test-frameworks
	$(BIN)/python -m tests.frameworks.torch_rpc_suite $(SUITE_ARGS)

# Half of the time guided by coverage, where atheris can be installed.
FUZZ_SECONDS ?= 300
.PHONY: fuzz
fuzz: $(DEV_READY) ## give hostile bytes to the decoders and the machines for FUZZ_SECONDS
	PYTHONPATH=. $(BIN)/python -m tests.fuzz --seconds $$(($(FUZZ_SECONDS) / 2)) --seed $$RANDOM
	$(INSTALL) --quiet --editable '.[fuzz]'
	if $(BIN)/python -c 'import atheris' 2>/dev/null; then for target in plain-datagram signed-datagram echo local-message frames called calling; do \
		PYTHONPATH=. $(BIN)/python -m tests.fuzz --guided $$target --seconds $$(($(FUZZ_SECONDS) / 14)); done; fi

.PHONY: bench
bench: $(BENCH_READY) ## measure mingle beside its peers, keep and draw the results (needs root, like the lab)
	@PYTHONPATH=src:. $(BIN)/python -m benchmarks $(BENCH_ARGS)

.PHONY: bench-quick
bench-quick: $(BENCH_READY) ## three minutes of it: what got worse since the results were kept?
	@PYTHONPATH=src:. $(BIN)/python -m benchmarks --quick $(BENCH_ARGS)

.PHONY: bench-guard
bench-guard: $(BENCH_READY) ## a minute of it, as CI runs it: is a ratio far beyond what it was?
	@PYTHONPATH=src:. $(BIN)/python -m benchmarks --guard

.PHONY: stats
stats: $(DEV_READY) ## count lines, classes and constants, and measure what importing mingle and one discovery cost
	@$(BIN)/python benchmarks/stats.py $(STATS_ARGS)

# The oldest that is supported; another one: make test-torch TORCH=2.15.0. What that runs on comes in the versions that it
# asks for.
TORCH ?= 2.6.0
TORCH_VENV := .venv-torch-$(TORCH)

.PHONY: test-torch
test-torch: ## run the tests of all that touches torch on another one: make test-torch TORCH=2.6.0
	$(PYTHON) -m venv $(TORCH_VENV)
	sed '/^torch==/d; /^# what torch runs on/,/^$$/d' constraints.txt > $(TORCH_VENV)/constraints.txt
	PIP_CONSTRAINT=$(TORCH_VENV)/constraints.txt $(TORCH_VENV)/bin/python -m pip install \
		--disable-pip-version-check --quiet torch==$(TORCH) --editable '.[dev]'
	$(TORCH_VENV)/bin/python -m pytest -n $(JOBS) tests/unit/distributed tests/unit/elastic tests/unit/engine/test_discovery.py \
		tests/unit/engine/test_store.py tests/unit/engine/test_store_keeper.py \
		tests/lab/test_forming.py tests/lab/test_lifecycle.py tests/lab/test_agents.py tests/lab/test_torchrun.py \
		tests/lab/test_torchrun_faults.py tests/lab/test_torchrun_partitions.py $(PYTEST_ARGS)

.PHONY: wheels
wheels: | $(BIN)/pip ## make wheels of mingle and its dependencies but torch, for a cluster without network or compiler
	# pip before 23.1, as in Debian 12, can make a wheel of netifaces only in an isolated environment.
	PIP_USE_PEP517=1 $(PIP) wheel --quiet --no-deps --wheel-dir wheelhouse . \
		$$(sed -n -e '/^# what mingle runs on/,/^$$/p' -e '/^typing_extensions==/p' constraints.txt | grep -v -e '^#' -e '^torch==')
	@echo "on the other machines: pip install --no-index --find-links wheelhouse multinode-mingle"

.PHONY: docs
docs: $(DOCS_READY) $(MERMAID_READY) ## make the site of the documents in site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "site/index.html"

.PHONY: dist
dist: $(DOCS_READY) $(DEV_READY) ## build the sdist, from it the wheel, and check both: what an index shows, and that no file is missing
	rm -rf dist build/sdist
	PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt $(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	mkdir -p build/sdist
	tar --extract --gzip --file dist/*.tar.gz --directory build/sdist --strip-components=1
	cd build/sdist; $(CURDIR)/$(BIN)/python -m pytest -n 2 --quiet tests/unit/test_project.py tests/docs/test_docs.py \
		-k 'not (demo or ranks or print or message or torchrun)'

.PHONY: lint
lint: $(DEV_READY) ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: fmt
fmt: $(DEV_READY) ## format the code, and fix the style where ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

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
