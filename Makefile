# `make` lists the targets. PYTHON=python3.12 chooses another interpreter (3.11 or newer).
PYTHON ?= python3
TASK ?= maze
ARGS ?=
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
# pytest-xdist has two workers: one thread each, or they fight for the cores.
TEST_WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help train test lint bench clean

help:
	@echo "make train TASK=maze ARGS=...  set up $(VENV) and train (ARGS: flags of train.py)"
	@echo "make test                      set up $(VENV) and run the tests"
	@echo "make lint                      ruff"
	@echo "make bench                     each benchmark prints one JSON line"
	@echo "make clean                     remove $(VENV) and caches; runs/ stays"

train: $(READY)
	$(RUN) train.py --task $(TASK) $(ARGS)

test: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n $(TEST_WORKERS) $(ARGS)

lint: $(READY)
	$(RUN) -m ruff check .

bench: $(READY)
	@for script in benchmarks/rollout.py benchmarks/packed_step.py; do $(RUN) $$script || exit 1; done

# Torch comes first and exactly pinned: an open range could pull another build of it.
$(READY): setup.cfg constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or newer is needed; name one, as in: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
