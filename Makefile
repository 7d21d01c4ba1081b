# make setup | check | test | demo | bench | torture | clean
PYTHON ?= python3.11
VENV := .venv
RUN := OMP_NUM_THREADS=1 $(VENV)/bin
STAMP := $(VENV)/.ready
NAME ?= demo

.PHONY: setup check test demo bench torture clean
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

# The property and fault tests, with many more random histories each
torture: setup
	@LEEWAY_TORTURE=1 $(RUN)/python -m pytest tests/wire tests/replay tests/correction tests/learner/test_killed.py \
	  --hypothesis-profile=torture --timeout=7200

# Runs stay: they are yours
clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
