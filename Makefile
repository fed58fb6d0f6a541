PYTHON ?= python3

VENV  := .venv
READY := $(VENV)/.ready
PY    := $(VENV)/bin/python

# Threads that wait spin by default; on a machine that does something else too, they hold up each other.
export OMP_WAIT_POLICY ?= passive

.DEFAULT_GOAL := help
.PHONY: help demo test test-full lint format bench results clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' Makefile

# The development environment. It is rebuilt when the metadata or the pins change.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY) ## Train on digits: RigL with Sup-tickets at 90 % sparsity, under a minute
	$(PY) -m suptickets train

test: $(READY) ## Run the tests, without the slow ones
	$(PY) -m pytest -q -n 2 --dist loadfile

test-full: $(READY) ## Run all the tests, the slow ones included
	$(PY) -m pytest -q -n 2 --dist loadfile -m ""

lint: $(READY) ## Check style, formatting and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(READY) ## Rewrite the sources in the project's style
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(READY) ## Run the project's own measurements, on a GPU if there is one
	for name in step explore superpose memory scale peers profile together loop build inference; do $(PY) -m suptickets bench $$name || exit 1; done

results: $(READY) ## Write docs/results.md and docs/trials, and their plots, from the stores in results/
	rm -rf docs/plots docs/trials
	$(PY) -m suptickets report results --format md --out docs/results.md
	for trial in $(notdir $(wildcard results/trials/*)); do $(PY) -m suptickets report results/trials/$$trial --format md --out docs/trials/$$trial/README.md || exit 1; done

clean: ## Remove all that was generated, the environment included
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
