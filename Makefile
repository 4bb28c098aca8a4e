# Every target sets up what it needs in .venv (benchmarks: .venv-bench); nothing else has to be installed first.
PYTHON ?= python3
BIN := .venv/bin
BENCH_BIN := .venv-bench/bin
WORKERS ?= 4
# Most tests wait for processes, so there are more workers than cores. Tests that share a fixture stay on one worker.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo test test-all sweep mutations check lint types bench bench-ett bench-ablation clean

help:  ## list what there is to do
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## */\t/' | expand -t 16

demo: .venv/.ready-rec  ## a DLRM under faults, plain and with headway, side by side (5 minutes; QUICK=1: 2)
	@QUICK=$(QUICK) $(BIN)/python -m bench.demo

test: .venv/.ready-test  ## run the tests of every promise (ARGS="tests/launch -x": a part)
	$(PYTEST) -m "not thorough" $(ARGS)

test-all: .venv/.ready-test  ## run all tests
	$(PYTEST) $(ARGS)

sweep: .venv/.ready-test  ## kill and crash at full size (HOURS=2: stop after that; it resumes where it stopped)
	HOURS=$(HOURS) $(BIN)/python -m tests.sweep $(ARGS)

mutations: .venv/.ready-test  ## break lines at random and see whether tests notice (ARGS="12 SEED all")
	$(BIN)/python -m tests.mutations $(ARGS)

check: lint types test-all  ## what CI runs: lint, types, all tests

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.ready
	$(BIN)/mypy

bench: .venv-bench/.ready-bench  ## measure headway against its peers; writes out/bench.json
	$(BENCH_BIN)/python -m bench $(ARGS)

bench-ett: .venv-bench/.ready-bench  ## what starts and faults cost, plain, with peers, with headway; one real job of 30 minutes (an hour)
	$(BENCH_BIN)/python -m bench.ett $(ARGS)

bench-ablation: .venv-bench/.ready-bench  ## what each technique gives, switched off alone
	$(BENCH_BIN)/python -m bench.ablation $(ARGS)

clean:  ## remove the environments and all output
	rm -rf .venv .venv-bench out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

%/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "headway needs Python 3.11 or newer; say which with make PYTHON=...")'
	$(PYTHON) -m venv $*

# torch comes first and alone: resolved together with the rest, a newer release could win.
%/.ready: %/bin/python pyproject.toml constraints.txt
	$*/bin/python -m pip install -q -c constraints.txt torch
	$*/bin/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

# torchrec comes alone: it asks for the fbgemm of CUDA, and the extra `rec` has what it needs on a CPU.
%/.ready-rec: %/.ready
	$*/bin/python -m pip install -q -c constraints.txt -e '.[dev,rec]'
	$*/bin/python -m pip install -q --no-deps torchrec==1.8.0
	@touch $@

# So does torchtitan: only its logger is run, which needs none of what the rest of it needs.
%/.ready-test: %/.ready-rec
	$*/bin/python -m pip install -q -c constraints.txt -e '.[dev,frameworks,rec,stores]'
	$*/bin/python -m pip install -q --no-deps torchtitan==0.3.0
	@touch $@

# dlrover comes alone: its pynvml would make every import of torch longer, and warn.
%/.ready-bench: %/.ready-rec
	$*/bin/python -m pip install -q -c constraints.txt -e '.[bench,rec]'
	$*/bin/python -m pip install -q --no-deps dlrover==0.6.1
	@touch $@

.PRECIOUS: %/bin/python %/.ready %/.ready-rec %/.ready-test %/.ready-bench
