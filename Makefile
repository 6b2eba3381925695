# make demo      train, export, rank and compare on real data; writes out/demo
# make test      the whole test suite (what needs a GPU is skipped where there is none)
# make lint      ruff, ruff-format, mypy and the repository's own bans
# make bench     the benchmark of one operator: make bench OPERATOR=compression_linear ARGS="--dtype bf16"
# make measure   on a GPU, what a kernel change has to show: tests, benchmarks, compute-sanitizer; writes out/measure
# make clean     remove what these made

VENV ?= .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
OPERATOR ?= compression_linear
OUT ?= out/measure

.PHONY: demo test lint bench measure clean

$(READY): tools/install pyproject.toml $(wildcard requirements/*.txt)
	tools/install $(VENV)
	touch $@

demo: $(READY)
	$(PYTHON) examples/01_quickstart.py
	$(PYTHON) examples/02_train_movielens.py
	$(PYTHON) examples/03_export_and_rank.py
	$(PYTHON) examples/04_latency.py
	$(PYTHON) examples/05_optimize_existing_model.py

test: $(READY)
	$(PYTHON) -m pytest -n 2 --dist worksteal $(ARGS)

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(PYTHON) tools/check_bans.py

bench: $(READY)
	$(PYTHON) -m benchmarks.run $(OPERATOR) $(ARGS)

measure: $(READY)
	PYTHON=$(PYTHON) tools/measure $(OUT) $(PARTS)

clean:
	rm -rf $(VENV) out build *.egg-info .pytest_cache .mypy_cache .ruff_cache
