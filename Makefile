# Two commands: `make quickstart` and `make test`. Both set up what they need, and can be run again at any time.
PYTHON ?= python3.11
VENV   ?= .venv
# CPU wheels of this release are what the tests run on; any newer torch works: make TORCH=torch quickstart
TORCH  ?= torch==2.13.0
RUN    ?= quickstart
BIN    := $(VENV)/bin

.PHONY: quickstart test test-all lint bench bench-peers chaos reference setup clean

$(VENV)/.ready: pyproject.toml setup.py $(wildcard src/strop/*/*/*.[ch])
	@echo "==> setting up $(VENV): torch and what strop needs (once, a minute or more)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)" "setuptools>=77"
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation -e ".[dev]"
	@echo "==> ready"
	@touch $@

setup: $(VENV)/.ready

quickstart: setup
	@$(BIN)/strop train recipes/quickstart.toml --continue --set name=$(RUN)

test: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	$(BIN)/strop model get smollm2
	$(BIN)/python -m pytest -m "not slow"

test-all: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check --fix . && $(BIN)/ruff format . && $(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/rollout_overhead.py
	$(BIN)/python benchmarks/sampler.py
	$(BIN)/python benchmarks/grpo_step.py
	$(BIN)/python benchmarks/sft_dpo.py

bench-peers: setup
	bash benchmarks/peers/setup.sh

chaos: setup
	$(BIN)/python checks/chaos.py --kills 200

# The reference, from the docstrings.
reference: setup
	$(BIN)/pip install --quiet --disable-pip-version-check pdoc
	$(BIN)/pdoc --output-directory build/reference strop

clean:
	rm -rf $(VENV) build dist src/*.egg-info
