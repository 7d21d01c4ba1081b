# make setup | check | test | demo | bench | torture | curves | clean
PYTHON ?= python3.11
VENV := .venv
RUN := OMP_NUM_THREADS=1 $(VENV)/bin
STAMP := $(VENV)/.ready
NAME ?= demo
JOBS ?= 1

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

# Every part of docs/reliability.md with all it can do, then `make curves`; the rest go on when a part fails. Single parts: python -m scripts.torture PART...
torture: setup
	@$(RUN)/python -m scripts.torture -j $(JOBS); parts=$$?; $(RUN)/python -m scripts.curves && exit $$parts

# One real run of every recipe on two engines and at two budgets, into docs/recipes.md: hours; what is measured at this source is not run again
curves: setup
	@$(RUN)/python -m scripts.curves

# Runs stay: they are yours
clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
