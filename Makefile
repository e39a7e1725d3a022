# Two commands on a fresh machine: `make quickstart` and `make test`. Each makes .venv when it is missing and installs
# the tested versions; both are safe to repeat.

PYTHON ?= python3
BIN := .venv/bin
JOBS ?= 2# processes that run tests, one torch thread each
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt

.PHONY: bench quickstart test fast mutants torture lint types clean help

help:
	@echo "make quickstart   two minutes, once installed: a ViT turned into a flow, with a report"
	@echo "make fast         the tests that take no more than a third of a second each, for every save (a minute on 2 cores)"
	@echo "make test         lint, types and all tests (under 10 minutes on 2 cores; JOBS=4 for more cores)"
	@echo "make mutants      do the tests notice broken mathematics? (about 15 minutes)"
	@echo "make bench        every claim of speed beside its peers, on a quiet machine (under 20 minutes)"
	@echo "make torture      kills, failing disks and 10,000 spoilt files, counted in docs/reliability.json (about an hour)"
	@echo "make clean        remove .venv and caches"

quickstart: .venv/quickstart.stamp
	$(BIN)/odevit quickstart

test: .venv/test.stamp lint types
	$(PYTEST) --ignore tests/with_timm
	PYTHONPATH=.venv/timm $(PYTEST) tests/with_timm

fast: .venv/test.stamp
	PYTHONDONTWRITEBYTECODE= $(PYTEST) --ignore tests/with_timm -m "not slow"

# breaks the mathematics on purpose, one line at a time, and counts how often the tests notice
mutants: .venv/test.stamp
	$(BIN)/python tests/mutants.py

# with trained models beside their teachers: BENCH='--pair cifar10 TEACHER DATA --pair cifar10-distilled TEACHER DATA'
bench: .venv/test.stamp
	$(PIP) --no-deps --upgrade --target .venv/timm vit-pytorch einops
	KINETO_LOG_LEVEL=99 $(BIN)/python benchmarks/suite.py $(BENCH)

# kills, failing disks and 10,000 spoilt files; `PARTS=long` trains for two hours and watches memory, handles and disk
torture: .venv/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/python tests/reliability/torture.py $(PARTS)

lint: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/test.stamp
	$(BIN)/mypy

# torch first and pinned: otherwise other packages bring the newest build with gigabytes of CUDA libraries
.venv/torch.stamp: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --upgrade pip setuptools wheel
	$(PIP) torch
	touch $@

.venv/quickstart.stamp: .venv/torch.stamp pyproject.toml
	$(PIP) --no-build-isolation -e '.[train]'
	touch $@

# timm needs torchvision, whose wheel does not import on a CPU-only torch and would break transformers with it: they
# live in a folder of their own, which only their tests see.
.venv/test.stamp: .venv/quickstart.stamp
	$(PIP) --no-build-isolation -e '.[dev]'
	$(PIP) --no-deps --upgrade --target .venv/timm timm torchvision
	touch $@

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache
