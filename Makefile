# Everything runs in .venv, made on first use from the pinned versions in constraints.txt. The demo
# installs what it needs alone; all else installs the tools too, and compiles every kernel.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
LIBRARY := .venv/.library
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
CHECK_PYTHON = @$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "found Python \
	%s: expected 3.11 or newer; name one: make PYTHON=python3.12" % sys.version.split()[0])'
# Ignores the settings that this machine has for uv, so it asks the public index. Nothing is installed.
RESOLVE := env $$(env | sed -n 's/^\(UV_[^=]*\)=.*/-u \1/p') \
	$(BIN)/uv pip compile --quiet --no-config --system-certs

.PHONY: demo pictures test test-every test-all test-oldest test-newest lint format numbers docs note check-install wheel bench gpu clean

$(LIBRARY): pyproject.toml constraints.txt
	$(CHECK_PYTHON)
	$(PYTHON) -m venv .venv
	$(INSTALL) -e '.[cli]'
	@touch $@

$(STAMP): $(LIBRARY) papers/pyproject.toml
	$(INSTALL) -e '.[cli,dev,docs]' -e papers
	$(BIN)/python -m retrograde.precompile
	@touch $@

demo: $(LIBRARY)  ## train a character model on sequences of 1,000 within 5 % of the memory
	$(BIN)/python examples/characters.py --memory 5% --report report

test: $(STAMP)  ## every promise, a few cases of each test; the code of all documentation
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-every: $(STAMP)  ## every case but the slow ones
	$(BIN)/python -m pytest -n 2 --dist worksteal --every

test-all: $(STAMP)  ## everything that needs no GPU
	$(BIN)/python -m pytest -n 2 --dist worksteal --every -m 'not gpu'

# An environment of its own in build/, some GB large, with this torch instead of the pinned one.
define TEST_WITH
	$(CHECK_PYTHON)
	rm -rf build/$(1) && $(PYTHON) -m venv build/$(1)
	grep -vE '^(torch|triton|setuptools)==' constraints.txt > build/$(1)/constraints.txt
	build/$(1)/bin/python -m pip install --quiet -c build/$(1)/constraints.txt '$(2)' -e '.[cli,dev,docs]' -e papers
	build/$(1)/bin/python -m pytest -n 2 --dist worksteal
endef

test-oldest:  ## the quick tests with the oldest torch that pyproject.toml names
	$(call TEST_WITH,oldest,torch==$(shell sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml))

test-newest:  ## the quick tests with the newest torch that pip finds
	$(call TEST_WITH,newest,torch)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

pictures: demo  ## README's pictures, from the demo's report
	cp report/learning.png report/memory.png docs

numbers: $(STAMP)  ## the tables of README and docs, from what the benchmarks wrote
	$(BIN)/python benchmarks/render_numbers.py

docs: $(STAMP)  ## the documentation site, in build/site; a warning fails it, which it would not with --quiet
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

note: $(STAMP)  ## two pages on the theorems, build/note.pdf
	$(INSTALL) typst
	mkdir -p build && $(BIN)/python -c 'import typst; typst.compile("papers/note/note.typ", output="build/note.pdf")'

check-install: $(STAMP)  ## whether the pinned versions and every extra resolve on other machines
	@if echo pip | $(RESOLVE) --no-cache --no-deps - 2>&1 | grep -q 'Failed to fetch'; \
	then echo 'skipped: no package index is reached'; exit; fi; \
	for version in 3.11 3.13; do \
	    printf '%s\n' '-e .[cli,dev,docs,jax,recipes]' '-e papers[irmas]' | \
	    $(RESOLVE) -c constraints.txt --python-version $$version --python-platform linux - \
	        >/dev/null || exit; \
	    echo "Python $$version: all extras resolve"; \
	done

wheel:  ## README's first code, on the built wheel, in an environment of its own
	$(CHECK_PYTHON)
	rm -rf build/wheel && $(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	build/wheel/venv/bin/python -m pip install --quiet -c constraints.txt build/wheel/*.whl
	awk '/^```python/ {on = 1; next} /^```/ {if (on) exit} on' README.md > build/wheel/first.py
	cd build/wheel && venv/bin/python first.py

bench: $(STAMP)  ## every claim of speed, both sides in one process; an hour
	$(BIN)/python benchmarks/front_page.py iterations
	$(BIN)/python benchmarks/recurrent.py grid
	$(BIN)/python benchmarks/cells.py small
	$(BIN)/python benchmarks/cells.py first_call
	$(BIN)/python benchmarks/resident.py chain
	$(BIN)/python benchmarks/planner.py questions
	$(BIN)/python benchmarks/planner.py ties
	$(BIN)/python benchmarks/resident.py million_steps
	$(BIN)/python benchmarks/scans.py backward
	$(BIN)/python benchmarks/planner.py chains
	$(BIN)/python benchmarks/chains.py networks
	$(BIN)/python benchmarks/chains.py least
	$(BIN)/python benchmarks/jax_scan.py scan
	$(BIN)/python benchmarks/scans.py rank_jacobians
	$(BIN)/python benchmarks/scans.py ranks_memory
	$(BIN)/python -m gruslys2016.processes
	$(BIN)/python -m wang2020.sparse_jacobians
	$(BIN)/python -m wang2020.sparse_networks
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[recipes]'
	$(BIN)/python benchmarks/recipes.py every

gpu:  ## the tests that need a CUDA device, benchmarks, docs/gpu.md: ten minutes, any interpreter with torch
	PYTHONPATH=src:papers $(PYTHON) benchmarks/gpu.py --device cuda

clean:
	rm -rf .venv report build papers/build src/*.egg-info papers/*.egg-info
