# make demo: the cockpit on a real 8-rank run. make test: the tests, without the exhaustive sweeps. make test-all: every
# test. make lint: style, types, import walls. Each command creates the environment first if it does not exist.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test test-all lint package man site bench fuzz parity clean

setup: $(READY)

# torch is installed first and pinned. On Linux, PyPI has only torch with CUDA; see docs/install.md for the CPU index.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: setup
	$(BIN)/cockpit demo

# More workers than cores, because many tests wait for processes. Tests keep the order of collection, in which slow
# directories come first.
WORKERS ?= 4
PARALLEL := -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

test: setup
	$(BIN)/pytest $(PARALLEL) -m "not exhaustive"

test-all: setup
	$(BIN)/pytest $(PARALLEL)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The wheel and the sdist in dist/, checked; then the wheel in a fresh environment outside the checkout. Needs minutes.
package: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[package]'
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/python -m tests.package.check_wheel dist

DOCS := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
MAN := --project-name train-cockpit --manual-title Cockpit --format pretty --function parser

# The man pages in docs/man, from the argument parsers; wheels contain them.
man: setup
	$(DOCS)
	SOURCE_DATE_EPOCH=0 COLUMNS=100 $(BIN)/argparse-manpage $(MAN) --prog cockpit --module cockpit.cli.parser --output docs/man/cockpit.1
	SOURCE_DATE_EPOCH=0 COLUMNS=100 $(BIN)/argparse-manpage $(MAN) --prog engine --module engine.cli.main --output docs/man/engine.1

# The pages of docs/ and the reference of the public interface as a site, in site/.
site: setup
	$(DOCS)
	$(BIN)/mkdocs build --strict

bench: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m tests.bench

# Takes an hour and a half on one core. `make fuzz RUNS=20000` is shorter.
RUNS ?= 1000000
fuzz: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	$(BIN)/python -m tests.fuzz --runs $(RUNS)

# Runs every parity case and rewrites the table of docs/evidence/parity.md.
parity: setup
	mkdir -p runs
	$(BIN)/python -W ignore -m tests.ranks.parity runs/parity > runs/parity.md
	sed '/^| case/,$$d' docs/evidence/parity.md > runs/parity.head
	cat runs/parity.head runs/parity.md > docs/evidence/parity.md
	cat runs/parity.md

clean:
	rm -rf $(VENV) runs build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
