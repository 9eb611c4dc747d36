# Needs Python 3.11 or later, with venv; everything else is installed into .venv.
PYTHON ?= python3
PYTEST_ARGS ?=
BIN := .venv/bin

# Compiled programs are kept between runs and shared by all processes.
export JAX_COMPILATION_CACHE_DIR := $(CURDIR)/.cache/jax
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS := 0
export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES := -1

.PHONY: demo test test-long lint clean

demo: .venv/installed
	$(BIN)/python -m spell_jax.train --config=configs/tiny.py --workdir=runs/demo

# The data pipeline apart: XLA once crashed while it serialized a program for the cache, in a process
# where Beam had left some thirty threads behind.
test: lint
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not long" $(PYTEST_ARGS) tests/data_pipeline
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not long" $(PYTEST_ARGS) \
		--ignore=tests/data_pipeline

test-long: .venv/installed-test
	$(BIN)/python -m pytest -q -m long $(PYTEST_ARGS)

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

clean:
	rm -rf .venv .cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# With a recent pip: that of Python 3.11 tries versions of Google's packages for ten minutes.
$(BIN)/python:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -U pip

.venv/installed: setup.py | $(BIN)/python
	$(BIN)/python -m pip install -q -e .
	touch $@

.venv/installed-test: setup.py | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[test]'
	touch $@
