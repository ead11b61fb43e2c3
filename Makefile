# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lint format clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/python -m benchmarks.demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m coop_plan.schemas.generate --check

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The mark is written last, so an interrupted set-up is taken up again.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "coop-plan needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[server,exact,plot,torch,demo,dev]'
	@touch $(READY)

clean:
	rm -rf .venv build *.egg-info
