# `make up` and `make test` do all their own set-up on a fresh machine with Python 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: up test soak mutation bench lint format clean

# The stamp is newer than what it was made from, so a changed requirement installs again and an unchanged one costs nothing.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v < (3, 11) and sys.exit("kvyard needs Python 3.11 or newer, $(PYTHON) is %d.%d: name another, as in make $(MAKECMDGOALS) PYTHON=python3.12" % v)'
	@echo "Installing into $(VENV)/, 1.6 GB: some minutes, and pip says nothing meanwhile"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m runner.kernels.cpu.build
	touch $@

up: $(VENV)/.installed
	$(BIN)/kvyard up $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/kvyard fetch-model
	$(BIN)/pytest --durations=25 $(ARGS)

soak: $(VENV)/.installed
	$(BIN)/kvyard fetch-model
	$(BIN)/pytest -m soak $(ARGS)

mutation: $(VENV)/.installed
	$(BIN)/python -m tools.mutation $(ARGS)

bench: $(VENV)/.installed
	$(BIN)/kvyard fetch-model
	$(BIN)/python -m tools.bench $(ARGS)

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
