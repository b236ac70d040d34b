# Everything here works from a fresh clone with Python 3.11 and pip; `make contracts` also needs node and npm.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1

.PHONY: help venv demo test test-slow test-npm lint format contracts contracts-check bench clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

$(STAMP): requirements/base.txt requirements/dev.txt requirements/dev-only.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11, or make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --quiet -r requirements/dev.txt
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps --editable .
	@touch $@

venv: $(STAMP) ## Create .venv from the pinned requirements

demo: $(STAMP) ## Run a whole network on this machine (about 4 minutes)
	$(BIN)/troth demo $(ARGS)

test: $(STAMP) ## Unit, property, vector, adversary and integration tests
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(STAMP) ## The network end to end and other tests that take minutes
	$(BIN)/python -m pytest -m slow

test-npm: $(STAMP) contracts-check ## Tests that need npm's compiler
	$(BIN)/python -m pytest -m npm

lint: $(STAMP) ## ruff (lint and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## Reformat
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

contracts: ## Rebuild contract artifacts with npm's solc
	cd contracts && npm ci --no-audit --no-fund && node tools/build.js

contracts-check: ## Rebuild in memory and compare with the committed artifacts, byte for byte
	cd contracts && npm ci --no-audit --no-fund && node tools/build.js --check

bench: $(STAMP) ## Network CPU per accepted rollout against a bare training loop
	$(BIN)/python benchmarks/overhead.py --json

clean: ## Remove what the targets made
	rm -rf $(VENV) contracts/node_modules run
