# `make` lists the targets.  Every target sets up .venv by itself, once (see scripts/setup).
#
#   make test TORCH_INDEX=https://download.pytorch.org/whl/cpu    torch without CUDA, a tenth of the download
#   make test TORCH_INDEX=https://download.pytorch.org/whl/cu126  torch for an older CUDA driver
#   make test PYTHON=/opt/python3.12/bin/python3                  this Python
#   make test LOWEST=1                                            the oldest versions that pyproject.toml allows
#
# These matter when .venv is made; after `make clean` they can be chosen again.  `make gpu`
# with PYTHON makes no .venv.

READY := .venv/.ready
BIN := .venv/bin
SEEDS ?= 10000
TESTS ?= tests
MINUTES ?= 5
EVERY ?= 30
MUTANTS ?= 400
export PYTHON TORCH_INDEX LOWEST

.DEFAULT_GOAL := help
.PHONY: help setup demo test sweep mutants chaos hostile fuzz lab rivals files lint types format check clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(READY) ## .venv with everything in it

$(READY): pyproject.toml constraints.txt scripts/setup
	@scripts/setup

demo: $(READY) ## four workers on this machine train a small GPT, dense and gTop-k (under 3 minutes)
	@$(BIN)/gridtrain demo

.PHONY: bench bench-quick gpu
SUITE ?= goals

bench: $(READY) ## exchanges over shaped links beside rivals, SUITE=goals (minutes; needs root); BENCH="--help"
	@cd benchmarks && ../$(BIN)/python -m bench --suite $(SUITE) --out $(CURDIR)/bench-results $(BENCH)

bench-quick: $(READY) ## what got slower: ratios to gloo and to a memory copy (under 3 minutes)
	@cd benchmarks && ../$(BIN)/python -m bench quick $(BENCH)

gpu: $(if $(PYTHON),,$(READY)) ## all that waits for a CUDA device (under 10 minutes); PYTHON=python3 as it is, without .venv; GPU="--help"
	@PYTHONPATH="$(CURDIR):$(CURDIR)/coordinator:$(CURDIR)/worker:$(CURDIR)/benchmarks:$$PYTHONPATH" \
		$(or $(PYTHON),$(BIN)/python) -m gpu $(GPU)

test: $(READY) ## the test suite, in three parts side by side; TESTS=tests/network/wire for a part of it
ifeq ($(strip $(TESTS)),tests)
	@$(BIN)/python scripts/test-suite $(TESTS)$(if $(RETRY_FAILED), --retry-failed $(RETRY_FAILED))
else
	$(BIN)/pytest $(TESTS)
endif

.PHONY: test-all
test-all: ## the whole suite with nothing left out: slow tests (tests/slow.txt), all seeds (about half an hour)
	@GRIDTRAIN_TESTS=all $(MAKE) --no-print-directory test

.PHONY: test-adapters
test-adapters: $(READY) ## DDP's hook, sites, Hugging Face, Lightning, Accelerate, loggers: installs these and tests all
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[adapters]"
	$(BIN)/pytest tests/adapters

sweep: $(READY) ## the randomised tests over SEEDS=10000 seeds; GRIDTRAIN_SEED=123 make sweep replays one
	GRIDTRAIN_SEEDS=$(SEEDS) $(BIN)/pytest -m sweep --timeout=0 -rP $(TESTS)

lab: $(READY) ## step times behind NAT and through relays, in network namespaces (needs root); LAB="--help"
	@cd benchmarks && ../$(BIN)/python -m lab.volunteers $(LAB)

rivals: $(READY) ## install what others would use, each in an environment of its own, to be measured beside us; NAMES=mpi for one
	@cd benchmarks && ../$(BIN)/python -m rivals setup $(NAMES)

fuzz: $(READY) ## hostile input into all decoders and state machines for MINUTES=5; TARGET=codec SEED=7 for less
	@$(BIN)/python tests/fuzz --minutes $(MINUTES) $(if $(TARGET),--target $(TARGET)) $(if $(SEED),--seed $(SEED)) $(if $(JOBS),--jobs $(JOBS))

mutants: $(READY) ## how many of MUTANTS=400 small changes of the pure packages the tests notice, at least 90 %; SEED=2 (about an hour)
	@GRIDTRAIN_SEEDS=10 $(BIN)/python tests/mutation --count $(MUTANTS) --seed $(or $(SEED),1) --least 0
	@$(BIN)/python tests/mutation --again --tests tests --bound 600

chaos: $(READY) ## real processes under a fault each EVERY=30 s for MINUTES=5, and a calm run beside it; SEED=1 CHAOS="--help"
	@cd benchmarks && ../$(BIN)/python -m chaos --minutes $(MINUTES) --every $(EVERY) $(if $(SEED),--seed $(SEED)) $(CHAOS)

hostile: $(READY) ## a hostile member among real processes, and strangers at the door (minutes, all cores)
	GRIDTRAIN_HOSTILE=1 $(BIN)/pytest tests/integration/test_hostile.py tests/integration/test_load.py

.PHONY: compose-test docker-lint
compose-test: ## docker/: images, four workers in containers, one killed (minutes; needs an engine); WHEELHOUSE=folder
	@python3 docker/test/compose_test.py $(if $(WHEELHOUSE),--wheelhouse $(WHEELHOUSE)) \
		$(if $(filter-out undefined,$(origin TORCH_INDEX)),--torch-index "$(TORCH_INDEX)") $(COMPOSE_TEST)

docker-lint: ## docker/: hadolint, compose files, systemd units; what is not installed is named and skipped
	@scripts/lint-docker

DOCS := .venv/.docs-ready
.PHONY: docs
docs: $(DOCS) ## the documentation as HTML in build/docs, with the figures of benchmarks/results; a warning is an error
	@$(BIN)/python docs/figures.py
	@$(BIN)/python -m sphinx -b html -q -W --keep-going -d build/doctrees docs build/docs
	@echo "documentation: build/docs/index.html"

$(DOCS): $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@touch $@

files: ## every file except tests, with one line on what it decides: make files | grep -i "batch norm"
	@$(or $(PYTHON),python3) docs/files.py

lint: $(READY) ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY) ## mypy --strict for the three packages
	$(BIN)/mypy

format: $(READY) ## let ruff mend what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

check: lint types test ## lint, types and test

clean: ## back to a fresh clone: removes .venv, caches, builds
	rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
