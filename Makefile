# Two commands matter: `make sweep` and `make test`. Each sets up .venv first when it is missing or stale.
PYTHON ?=
export PYTHON
RUN := .venv/bin/python
ARGS ?=
# One BLAS/XLA thread pool per test worker: two workers with all cores each would only fight.
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup sweep test lint format notebooks bench corpus

help:  ## list the commands
	@awk -F':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## create or refresh .venv (the other commands do this by themselves)
	@./.ci/setup

sweep: setup  ## plan, train, fit and report a compute-optimal sweep (ARGS="plan" shows the grid first)
	@$(RUN) -m experiments.sweep $(ARGS)

test: setup  ## every CPU test: kernels in the interpreter, lowering for CUDA, notebooks, README, a one-minute sweep
	@$(RUN) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

lint: setup  ## ruff (lint and format) and pyright
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m pyright

format: setup  ## rewrite the sources the way ruff wants them
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

notebooks: setup  ## execute the notebooks and keep their output
	@$(RUN) -m pytest tests/test_notebooks.py $(ARGS)

bench: setup  ## time attention beside its peers on this machine (ARGS="--help")
	@$(RUN) -m experiments.benchmarks.attention $(ARGS)

corpus: setup  ## build the larger corpus from Debian packages into corpus/
	@$(RUN) -m experiments.data corpus $(ARGS)
