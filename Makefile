# Ten words, nothing else to learn. `make demo` and `make test` do all their set-up on a fresh machine.
PYTHON ?= python3
VENV := .venv/bin
export PYTHONPATH := src

.PHONY: help demo test check soak serve bench gpu-check gpu-bench train

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: ## install, start both services on the embedded model, send a chat request with a tool
	@$(PYTHON) tools/bootstrap.py engine vocab
	@$(VENV)/python -m rose.cli.main demo
	@echo "Next: source .venv/bin/activate; rose serve; rose chat (in a second terminal); rose --help"

test: ## install, run the tests of the CPU ring
	@$(PYTHON) tools/bootstrap.py engine test
	@$(VENV)/python -m pytest -n 2 --dist loadfile -m "not slow" -rs

check: ## format, lint, types, rule tests
	@$(PYTHON) tools/bootstrap.py engine test check
	@$(VENV)/ruff format --check src tests tools training benchmarks
	@$(VENV)/ruff check src tests tools training benchmarks
	@$(VENV)/pyright --pythonpath $(VENV)/python
	@$(VENV)/python -m pytest tests/rules

soak: ## the tests that run longer
	@$(PYTHON) tools/bootstrap.py engine test soak
	@$(VENV)/python -m pytest -m slow --timeout 1800

serve: ## start both services on the embedded model
	@$(PYTHON) tools/bootstrap.py engine vocab
	@$(VENV)/python -m rose.cli.main serve

bench: ## time the kernels on this machine, JSON lines in benchmarks/results
	@$(PYTHON) tools/bootstrap.py engine
	@$(VENV)/python -m rose.bench.kernels --json benchmarks/results/kernels-$$(date +%Y%m%d).jsonl

train: ## train the embedded model anew
	@$(PYTHON) tools/bootstrap.py engine
	@$(VENV)/python training/train.py --out .cache/trained

# These two install nothing; COMMIT=... where the tree has no .git, SIZES=20b for one model, ONLY="20b start,draw" for
# the steps with one of these in their name, BUDGET=540 for those that fit into so many seconds, OUT=... for results,
# DRY=1 for the plan alone.
SIZES ?= 20b,120b
OUT ?= benchmarks/results
# A PYTHON that was named, else the one that the other words install into, where they have.
GPU_PYTHON = $(if $(filter file,$(origin PYTHON)),$(or $(wildcard $(VENV)/python),$(PYTHON)),$(PYTHON))
GPU = $(GPU_PYTHON) tools/gpu.py
GPU_WORDS = --commit "$(COMMIT)" --sizes "$(SIZES)" --only "$(ONLY)" --out "$(OUT)" \
	$(if $(BUDGET),--budget $(BUDGET)) $(if $(DRY),--dry-run)
gpu-check: ## kernels x cases, sanitizers, the model against its reference, on a machine with torch, triton, a GPU
	@$(GPU) check $(GPU_WORDS)

gpu-bench: ## the tables, likewise
	@$(GPU) bench $(GPU_WORDS)
