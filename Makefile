# polar_env: `make demo` shows the whole line, `make test` is what CI runs. Both bootstrap a fresh machine by themselves.

SHELL := /bin/bash
# Any Python that runs will do to start with: the bootstrap looks for the best one itself.
PY3 ?= $(shell for p in python3 python3.13 python3.12 python3.11 python /usr/bin/python3; do \
         "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null && { echo "$$p"; break; }; done)
BOOTSTRAP = $(if $(PY3),$(PY3) scripts/bootstrap.py,$(error no Python >= 3.8 runs here: install Python 3.13, or make PY3=/path/to/python3))
BIN := .venv/bin
export PYTHONUNBUFFERED := 1

# make demo HARNESS=codex TASK=psf__requests-6028 ENGINE=vllm MODEL_URL=http://host:8000/v1 DATA=rows.parquet
DEMO_ARGS = $(if $(HARNESS),--harness '$(HARNESS)') $(if $(TASK),--task '$(TASK)') $(if $(ENGINE),--engine '$(ENGINE)') \
            $(if $(MODEL_URL),--model-url '$(MODEL_URL)') $(if $(DATA),--data '$(DATA)')

COVERAGE = --cov=polar_env --cov-report=term --cov-fail-under=90
# Python's own monitoring (3.12 and newer) costs a tenth, where a trace function doubles what the tests compute.
CORE = COVERAGE_CORE=$$($(BIN)/python -c 'import sys; print("sysmon" if sys.version_info >= (3, 12) else "ctrace")')
DEFAULT_SET = not vllm and not nemo_rl and not slow

.PHONY: help demo test test-all conformance chaos gold attack test-vllm lint format clean

help:
	@echo "make demo       GRPO groups of four real agent CLIs on real tasks, graded (HARNESS= TASK= ENGINE= MODEL_URL= DATA=)"
	@echo "make test       lint, types and the default tests with coverage: what CI runs, under 15 minutes"
	@echo "make test-all   and the slow tests and those that need NeMo-RL (skipped, and said so, where it is not importable)"
	@echo "make conformance  every real CLI in every case of tests/conformance/cases.py, and the matrix (half an hour)"
	@echo "make gold       every real SWE-bench instance that runs here: right fix 1.0, none 0.0 (needs POLAR_SWEBENCH_DATA)"
	@echo "make attack     every attack on the grading, on a real instance; honest odd patches too"
	@echo "make chaos      a hundred rollouts whose harnesses, sandboxes and graders are shot at random, and whole workers"
	@echo "make test-vllm  a real vLLM on this CPU (installs 3.5 GB into .venv-vllm on first use)"
	@echo "make lint       ruff and pyright alone;  make format;  make clean"

demo:
	@$(BOOTSTRAP) --demo
	@$(BIN)/polar demo $(DEMO_ARGS)

lint:
	@$(BOOTSTRAP) --test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Two files at a time, as much of it is waiting: make test JOBS=0 is one process (tests/conftest.py).
test test-all: JOBS := 2
test: SELECTED = $(DEFAULT_SET)
test-all: SELECTED = not vllm
test test-all: lint
	$(CORE) $(BIN)/python -m pytest -m "$(SELECTED)" -n $(JOBS) --dist loadfile --no-loadscope-reorder $(COVERAGE) $(PYTEST_ARGS)

conformance:
	@$(BOOTSTRAP) --test
	$(BIN)/python -m pytest -m conformance $(PYTEST_ARGS)

# As many at a time as there are cores: make gold JOBS=1
JOBS ?= auto
gold: GRADED = tests/e2e/test_gold.py
attack: GRADED = tests/test_attacks.py tests/e2e/test_attacks.py
gold attack:
	@$(BOOTSTRAP) --test
	$(BIN)/python -m pytest -m $@ -n $(JOBS) $(GRADED) $(PYTEST_ARGS)

chaos:
	@$(BOOTSTRAP) --test
	$(BIN)/python -m pytest -s tests/e2e/test_chaos.py $(PYTEST_ARGS)

test-vllm:
	@$(BOOTSTRAP) --test
	@$(BOOTSTRAP) --vllm
	$(BIN)/python -m pytest -m vllm $(PYTEST_ARGS)

format:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-vllm .cache .pytest_cache .ruff_cache .hypothesis .coverage .coverage.* build dist out outputs
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
