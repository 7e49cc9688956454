# Each target sets up .venv if it does not exist yet.
PYTHON ?= python3
BIN := .venv/bin
# Not compiled: of the many modules of torch few are imported, which Python compiles then.
PIP := $(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt

# Tests that fork: run apart from the others, in processes where nothing was compiled before.
FORKING := tests/train/test_distill.py tests/train/test_distill_mixed.py tests/train/test_resume.py tests/train/test_finetune_processes.py tests/utils/test_signals.py

.PHONY: demo explore test coverage lint bench docs gallery notebooks clean

demo: .venv/viz.stamp
	$(BIN)/veca demo

explore: .venv/web.stamp
	$(BIN)/veca explore

# The tests of the explorer need Chromium and are skipped without it: apt-get install chromium
test: .venv/dev.stamp
	$(BIN)/python -m pytest --quiet -n auto --dist loadfile --no-loadscope-reorder $(COVER) $(FORKING:%=--ignore=%)
	VECA_TESTS_FORK=1 $(BIN)/python -m pytest --quiet -n auto --dist worksteal $(COVER:--cov=--cov --cov-append) $(FORKING)

# Test coverage; the tests take longer with it.
coverage: COVER := --cov
coverage: test

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo build/site/index.html

# The figures of the documentation, with the pretrained weights; takes minutes. Two of them need Chromium.
gallery: .venv/dev.stamp
	$(BIN)/python docs/gallery.py
	$(BIN)/veca bench explorer shot --out docs/images/explorer.png

# Runs the notebooks of the documentation and saves their outputs in them; takes minutes, on a machine with nothing else to do.
notebooks: .venv/dev.stamp
	$(BIN)/python tools/notebooks.py

bench: .venv/bench.stamp
	$(BIN)/veca bench model --out build/bench/model
	$(BIN)/veca bench train --out build/bench/train
	$(BIN)/veca bench attention --out build/bench/attention
	$(BIN)/veca bench plot build/bench/*/results.json --out build/bench
	$(BIN)/veca bench memory
	$(BIN)/veca bench embed --out build/bench/embed

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/%.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e '.[$*]'
	touch $@

clean:
	rm -rf .venv .coverage .pytest_cache .mypy_cache .ruff_cache veca-demo
