# make setup | check | test | demo | bench | torture | curves | clean
PYTHON ?= python3.11
VENV := .venv
RUN := OMP_NUM_THREADS=1 $(VENV)/bin
STAMP := $(VENV)/.ready
NAME ?= demo

.PHONY: setup check test demo bench torture curves clean
.DEFAULT_GOAL := setup

setup: $(STAMP)

# Again only when one of these files changed
$(STAMP): requirements-cpu.txt requirements-engine-cpu.txt requirements-engine-only-cpu.txt \
  requirements-dev.txt constraints-cpu.txt pyproject.toml scripts/setup
	@scripts/setup "$(PYTHON)" "$(VENV)"
	@touch $@

check: setup
	@scripts/check

test: check
	@$(RUN)/python -m pytest

demo: setup
	@$(RUN)/leeway run configs/tiny-cpu.toml --name $(NAME)

bench: setup
	@$(RUN)/python -m scripts.bench

# The property and fault tests, with many more random histories each, and then `make curves`
torture: setup
	@LEEWAY_TORTURE=1 $(RUN)/python -m pytest tests/wire tests/replay tests/correction tests/learner/test_killed.py \
	  --hypothesis-profile=torture --timeout=7200
	@$(RUN)/python -m scripts.curves

# One real run of every recipe on two engines and at two budgets, into docs/recipes.md: hours; what is measured at this source is not run again
curves: setup
	@$(RUN)/python -m scripts.curves

# Runs stay: they are yours
clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
