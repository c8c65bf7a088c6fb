# One environment in .venv, used without activation. Needs Python 3.11 or newer, git and make; nothing else.
# PIP_ARGS goes to every `pip install`, for instance to take another build of torch.

PYTHON      ?= python3
PIP_ARGS    ?=
PYTEST_ARGS ?=
SEEDS       ?= 10000
INPUTS      ?= 1000000
GPU_ARGS    ?=
RELEASE_ARGS ?=

VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt $(PIP_ARGS)
STAMP  := $(shell date +%Y%m%d-%H%M%S)

# Tests start hundreds of processes, which are to find modules compiled.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-docker test-slurm test-trainers test-gpu gpu dst fuzz lint docs release clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

install: $(VENV)/run.stamp  ## the environment alone, in .venv: to train, without what tests need
	@echo "installed: $(BIN)/diloco --help"

demo: $(VENV)/run.stamp  ## train 4 learners, kill one at 40 %, start it again at 60 %; results in runs/
	$(BIN)/diloco demo --out runs/demo-$(STAMP)

# Two processes a core: tests of processes and servers wait for half of their time.
test: $(VENV)/dev.stamp  ## all tests but the slow, browser, prometheus, gpu, docker, slurm and trainers ones
	$(BIN)/python -m pytest -m "not slow and not browser and not prometheus and not gpu and not docker and not slurm and not trainers" -n $$((2 * $$(getconf _NPROCESSORS_ONLN))) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-all: $(VENV)/dev.stamp  ## the slow, browser and prometheus ones too: whole training runs as processes
	$(BIN)/python -m pytest -m "not gpu and not docker and not slurm and not trainers" $(PYTEST_ARGS)

test-docker: $(VENV)/dev.stamp  ## compose.yaml for real; skipped where no Docker Engine runs
	$(BIN)/python -m pytest -m docker -s $(PYTEST_ARGS)

test-slurm: $(VENV)/dev.stamp  ## deploy/slurm on a Slurm of one node; skipped without Debian's slurm-wlm, and root
	$(BIN)/python -m pytest -m slurm $(PYTEST_ARGS)

test-trainers: $(VENV)/trainers.stamp  ## learners in the trainers of others (transformers, TRL, Accelerate, Lightning), and in JAX
	$(BIN)/python -m pytest -m trainers $(PYTEST_ARGS)

test-gpu: $(VENV)/dev.stamp  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

gpu: $(VENV)/dev.stamp  ## all that needs a GPU, in pieces; interrupted, it goes on; GPU_ARGS=--rehearse: small, on the CPU
	$(BIN)/diloco bench gpu $(GPU_ARGS)

dst: $(VENV)/dev.stamp  ## SEEDS=10000 simulated worlds under faults, over all cores; interrupted, it goes on where it was
	$(BIN)/python -m tests.world seeds --seeds $(SEEDS)

fuzz: $(VENV)/dev.stamp  ## INPUTS=1000000 broken messages and payloads for every decoder; about a minute
	$(BIN)/python -m tests.fuzz --inputs $(INPUTS)

lint: $(VENV)/dev.stamp  ## ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Not --quiet: --strict would not hear of broken links then.
docs: $(VENV)/docs.stamp  ## write the reference pages, and build the site with search in site/; broken links fail
	$(BIN)/python -m docs.generate
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo 'open site/index.html, or copy the folder site to any web server'

release: $(VENV)/release.stamp  ## wheel and sdist of the tagged commit in dist/, tried; RELEASE_ARGS=--offline: with what is installed
	PIP_ARGS='$(PIP_ARGS)' $(BIN)/python deploy/release.py $(RELEASE_ARGS)

clean:  ## remove the environment and caches; runs/ stays
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Python, and pip beside it. `venv` is a package of its own on Debian and Ubuntu.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'This project needs Python 3.11 or newer, and `$(PYTHON)` is none.' \
	       'Say which one to use: make PYTHON=/path/to/python3.11 ...' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo '`$(PYTHON)` lacks the venv module. Install it (Debian, Ubuntu: the package python3-venv),' \
	       'or say which Python to use: make PYTHON=/path/to/python3.11 ...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Installed once, and again when what is installed changes. `dev` contains `run`.
$(VENV)/dev.stamp: pyproject.toml studies/pyproject.toml constraints.txt | $(BIN)/python
	@echo 'installing into $(VENV); torch is large, this can take some minutes'
	$(PIP) -e '.[dev]' -e studies
	@touch $(VENV)/run.stamp $@

$(VENV)/run.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'installing into $(VENV); torch is large, this can take some minutes'
	$(PIP) -e '.[run]'
	@touch $@

$(VENV)/trainers.stamp: pyproject.toml studies/pyproject.toml constraints.txt | $(BIN)/python
	@echo 'installing into $(VENV); torch is large, this can take some minutes'
	$(PIP) -e '.[trainers]' -e studies
	$(PIP) --no-deps torchtitan
	@touch $(VENV)/dev.stamp $(VENV)/run.stamp $@

$(VENV)/release.stamp: pyproject.toml studies/pyproject.toml constraints.txt | $(BIN)/python
	@echo 'installing into $(VENV); torch is large, this can take some minutes'
	$(PIP) -e '.[dev,release]' -e studies
	@touch $(VENV)/dev.stamp $(VENV)/run.stamp $@

$(VENV)/docs.stamp: pyproject.toml studies/pyproject.toml constraints.txt | $(BIN)/python
	@echo 'installing into $(VENV); torch is large, this can take some minutes'
	$(PIP) -e '.[run,docs]' -e studies
	@touch $(VENV)/run.stamp $@
