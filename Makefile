# Two commands on a fresh machine: git clone, make demo. Every target first makes .venv with the tested versions.
#   make demo ARGS=--json      make serve ARGS="--port 9000"      make test ARGS="-k batch"

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Run from here, `import kernels` must not find our folder: it is the name of somebody else's package.
export PYTHONSAFEPATH := 1

.PHONY: help venv demo serve test lint format types protos docs golden bench clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    a local system with two workers answers a chat and a batch, then ends"
	@echo "make serve   the same system, until Ctrl-C"
	@echo "make test    all tests            make lint    style and import rules"
	@echo "make types   mypy                 make format  put the style right"
	@echo "make protos  gRPC stubs           make golden  reference answers of the default model"
	@echo "make docs    these pages as a site"
	@echo "make bench   benchmarks           make clean   remove what the above made, .venv included"

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

venv: $(INSTALLED)

demo: venv
	@$(BIN)/python examples/demo.py $(ARGS)

serve: venv
	@$(BIN)/octavo serve --workers 2 $(ARGS)

# Many tests wait for a clock or a process, so two at a time halve the time even on two cores; those of a file stay
# together, for its fixtures' sake. JOBS=0: one by one.
JOBS ?= 2
test: venv
	@$(BIN)/pytest -n $(JOBS) --dist loadfile $(ARGS)

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

format: venv
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: venv
	$(BIN)/mypy

protos: venv
	$(BIN)/python -m octavo.protos.generate

docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "the pages are in build/site"

golden: venv
	$(BIN)/python tests/make_golden.py $(ARGS)

# The serving workloads need GSM8K's test set, which is not shipped: OCTAVO_GSM8K=FILE. PEERS=1 runs other engines
# on them, too, each in an environment that it makes for itself (gigabytes), and prints ratios to targets. It can be
# broken off and gone on with: make bench PEERS=1 ARGS="--only contest --results FILE"
bench: venv
	@$(BIN)/python benchmarks/all.py $(if $(PEERS),--peers) $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
