# Every target sets up what it needs in .venv; nothing else has to be installed first.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
REC_READY := .venv/.ready-rec
TEST_READY := .venv/.ready-test
BENCH_READY := .venv/.ready-bench

.DEFAULT_GOAL := help
.PHONY: help demo test check lint types bench bench-ett bench-ablation clean

help:  ## list what there is to do
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## */\t/' | expand -t 16

demo: $(REC_READY)  ## a DLRM under faults, plain and with headway, side by side (5 minutes; QUICK=1: 2)
	@QUICK=$(QUICK) $(BIN)/python -m bench.demo

test: $(TEST_READY)  ## run the tests
	$(BIN)/python -m pytest $(ARGS)

check: lint types test  ## what CI runs: lint, types, tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

bench: $(BENCH_READY)  ## measure headway against its peers; writes out/bench.json
	$(BIN)/python -m bench $(ARGS)

bench-ett: $(BENCH_READY)  ## what starts and faults cost, plain, with peers, with headway; one real job of 30 minutes (an hour)
	$(BIN)/python -m bench.ett $(ARGS)

bench-ablation: $(BENCH_READY)  ## what each technique gives, switched off alone
	$(BIN)/python -m bench.ablation $(ARGS)

clean:  ## remove the environment and all output
	rm -rf .venv out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "headway needs Python 3.11 or newer; say which with make PYTHON=...")'
	$(PYTHON) -m venv .venv

# torch comes first and alone: resolved together with the rest, a newer release could win.
$(READY): .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

# torchrec comes alone: it asks for the fbgemm of CUDA, and the extra `rec` has what it needs on a CPU.
$(REC_READY): $(READY)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,rec]'
	$(BIN)/python -m pip install -q --no-deps torchrec==1.8.0
	@touch $@

# So does torchtitan: only its logger is run, which needs none of what the rest of it needs.
$(TEST_READY): $(REC_READY)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,frameworks,rec,stores]'
	$(BIN)/python -m pip install -q --no-deps torchtitan==0.3.0
	@touch $@

# dlrover comes alone: its pynvml would make every import of torch longer, and warn.
$(BENCH_READY): $(REC_READY)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[bench,rec]'
	$(BIN)/python -m pip install -q --no-deps dlrover==0.6.1
	@touch $@
