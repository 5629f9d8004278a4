# Two commands from a fresh clone with only Python (3.11 or newer) and make:
#   make demo     make test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# One thread per test process: two processes with two threads each would fight over two cores.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint-proof test-slow check docs format bench gpu-check wheel clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(STAMP)  ## Make .venv with ampwise, the linter, trackers, peers and the developers' tools

$(STAMP): pyproject.toml lint/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "ampwise needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ./lint --editable '.[dev,digits,trackers,peers,docs]'
	@touch $@

demo: setup  ## Run the main job on real data: every precision side by side (4 minutes at most)
	$(BIN)/ampwise bench charlm --quick --set size=auto

test: export PATH := $(CURDIR)/$(BIN):$(PATH)  # notebooks call the command by its name
test: setup  ## Run the tests (under 10 minutes on 2 cores)
	$(TEST) -m 'not slow and not gpu'
	$(TEST) --nbmake docs/notebooks

lint-proof: setup  ## Make every fix of the linter on 335 public files, and check what comes out (minutes, network)
	$(BIN)/python tests/lint/public_files.py build/public-files
	AMPWISE_LINT_FILES=build/public-files $(BIN)/python -m pytest -m slow tests/lint/test_every_fix.py

test-slow: setup  ## Run the tests that take minutes each
	$(TEST) -m slow

check: setup  ## Lint, formatting, types, import layering, the site and its links
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright
	$(BIN)/lint-imports
	$(SITE)

docs: setup  ## Build the site into build/site; open build/site/index.html
	$(SITE)

format: setup  ## Format the sources
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

bench: setup  ## Run the side-by-side benchmarks; results go to benchmarks/results
	for file in benchmarks/[a-z]*.py; do $(BIN)/python $$file || exit 1; done

gpu-check: export PYTHONPATH := src:lint/src
gpu-check:  ## CUDA tests and GPU benchmarks, with this machine's own Python and torch
	$(PYTHON) -m pytest -m gpu tests/gpu -p no:cacheprovider
	for file in guard step anatomy charlm memory diagnose; do $(PYTHON) benchmarks/$$file.py || exit 1; done

wheel: setup  ## Build the wheels, of ampwise and of the linter, into dist/
	$(BIN)/python -m build --wheel --no-isolation
	$(BIN)/python -m build --wheel --no-isolation --outdir dist lint

clean:  ## Remove what the targets made
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache
