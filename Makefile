# The one definition of every check and set-up step: people, pre-commit and CI call these targets.

SHELL := /bin/sh
.DEFAULT_GOAL := help

# Models and tokenizers that are converted or unpacked once; several clones may share the folder.
TOKENPLANE_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/tokenplane
export TOKENPLANE_CACHE

# Every process that imports torch and megatron-core would compile them again: eight seconds each.
unexport PYTHONDONTWRITEBYTECODE

# Another Python >= 3.11 to start from: make install PYTHON=/path/to/python3
PYTHON ?=
export PYTHON

BIN := .venv/bin
DEMO_OUT ?= demo-out
GYM_OUT ?= gym-e2e-out
# make gym-e2e GYM_MODEL=smollm2: a real model, no scripted answers. GYM_LEDGER=gym: the stock one.
GYM_MODEL ?= scripted
GYM_LEDGER ?= ours
# Workers of a test run: many tests wait for processes, so one more than the cores they are held to.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -n $(WORKERS)
# More for pytest: make test PYTEST_ARGS="-k splice"
PYTEST_ARGS ?=

.PHONY: help
help: ## Print this table
	@awk 'BEGIN { FS = ":.*## " } /^[a-z0-9-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' Makefile

.PHONY: install
install: ## Find or fetch Python 3.12 and make .venv from the locks
	@sh scripts/bootstrap.sh install

# Each executable in scripts/test_setup is one step; it must be quick when its work is done.
.PHONY: install-test
install-test: install ## Fetch what the tests need beside Python packages
	@set -e; PATH="$(CURDIR)/$(BIN):$$PATH"; export PATH; \
	for step in scripts/test_setup/*; do if [ -x "$$step" ]; then "$$step"; fi; done

.PHONY: lint
lint: install ## ruff check, ruff format --check, mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: format
format: install ## Let ruff rewrite imports, fixable findings and layout
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: test
test: install-test lint ## Everything that CI checks: lint, then the whole suite
	$(PYTEST) $(PYTEST_ARGS)

.PHONY: test-fast
test-fast: install-test ## The suite without what is slow or needs a real model
	$(PYTEST) -m "not slow and not engine" $(PYTEST_ARGS)

.PHONY: test-layout
test-layout: install ## Layering, names, locks and tracked files (seconds; a pre-commit hook)
	$(BIN)/python -m pytest tests/packaging -q -m "not slow" $(PYTEST_ARGS)

.PHONY: dist-check
dist-check: install ## Build sdist and wheel, install the base, look inside
	$(BIN)/python -m pytest tests/packaging $(PYTEST_ARGS)

.PHONY: demo
demo: install ## Roll out, stage, collect and audit with a small real model on the CPU
	$(BIN)/tokenplane demo --out $(DEMO_OUT)

.PHONY: gpu-check
gpu-check: install ## On a machine with one CUDA GPU: engine contract, capture, throughput
	PYTHONPATH=. $(BIN)/python scripts/gpu_check.py --whole-contract --out gpu-check-out

.PHONY: gym-e2e
gym-e2e: install ## Roll out through the whole NeMo-Gym stack and collect
	$(BIN)/python scripts/gym_e2e.py --out $(GYM_OUT) --model $(GYM_MODEL) --ledger $(GYM_LEDGER)

.PHONY: lock
lock: ## Write requirements/*.txt anew; UPGRADE=1 moves to the newest releases
	@sh scripts/bootstrap.sh lock $(if $(UPGRADE),--upgrade)

.PHONY: hooks
hooks: install ## Let git run lint before each commit (pre-commit)
	$(BIN)/pre-commit install

.PHONY: clean
clean: ## Remove what the targets made in this tree; the shared cache stays
	rm -rf .venv .cache .ruff_cache .hypothesis build dist $(DEMO_OUT) $(GYM_OUT) *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
