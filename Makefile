# `make demo` and `make test` set up .venv on a fresh machine.
PYTHON ?= python3
# Graphs with known optima, recorded traces and MiniMalloc's instances, for `make bench`.
DATA ?= ../shared/data
BIN := .venv/bin
FOLDERS := coop_plan
READY := .venv/.ready
comma := ,
OLDEST := .venv-oldest
NEWEST := .venv-newest
SHELL := bash
.SHELLFLAGS := -o pipefail -c
# Material's note to whoever chooses a generator; 9.x is maintained until 2027.
export NO_MKDOCS_2_WARNING := 1

.PHONY: help demo cluster test test-slow test-fast test-oldest test-newest lint format pictures docs coverage bench \
  papers digests gpu-bundle clean fits budgets
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help: ## List what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## Train GPT-2 in eager and under budgets, and compare
	$(BIN)/python -m benchmarks.demo

cluster: $(READY) ## Start a local cluster of servers, workers and Redis, and send requests
	$(BIN)/python -m benchmarks.local_cluster

# One thread a worker: threads that wait for each other take the other worker's core.
test test-slow: export OMP_NUM_THREADS = 1
test: $(READY) ## Run the tests that are not marked slow
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not slow'

test-slow: $(READY) ## Run the tests marked slow: more seeds, whole trainings, clusters, wheels
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m slow

# Without the runtime, tests marked slow, the property with the most examples and the cluster (SLOW), and
# the planner's exact methods, annealing, fuzzing of the verifier and placement of instances.
FAST := tests/schemas tests/api tests/test_docs.py tests/planner/core \
  tests/planner/test_verifier.py tests/planner/test_bound_model.py tests/planner/test_methods.py \
  tests/planner/test_plan_cache.py $(wildcard tests/planner/test_online_*.py)
SLOW := any_order_that_reads or test_cluster

test-fast: $(READY) ## Run the tests of an edit: schemas, verifier, service, small plans
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow' -k 'not ($(SLOW))' $(FAST)

# The tests that another PyTorch breaks first: its private names and training steps.
# They keep CI below an hour; RANGE=tests/runtime has all of them.
RANGE := $(addprefix tests/runtime/test_,torch_internals.py training.py)

test-oldest: $(OLDEST)/.ready ## Run tests of the runtime with the oldest PyTorch that is supported
	$(OLDEST)/bin/python -m pytest -n 2 --dist loadfile $(RANGE)

test-newest: $(NEWEST)/.ready ## Run tests of the runtime with the newest PyTorch that is supported
	$(NEWEST)/bin/python -m pytest -n 2 --dist loadfile $(RANGE)

lint: $(READY) ## Check style, types, generated files and the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m coop_plan.schemas.generate --check
	$(BIN)/python -m docs.help_text --check
	$(BIN)/python -m docs.wording --check
	$(BIN)/mkdocs build --quiet --strict

format: $(READY) ## Fix style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

pictures: $(READY) ## Draw the documents' pictures in headless Chromium
	$(BIN)/python -m docs.pictures

docs: $(READY) ## Build the documentation's site into build/docs; warnings are errors
	$(BIN)/python -m docs.help_text
	$(BIN)/mkdocs build --strict

coverage: $(READY) ## Measure the planner's line coverage, kernels included, into build/coverage
	$(BIN)/python -m benchmarks.line_coverage

# $(call bench,MODULE,ARGUMENTS): its table in build/bench/MODULE.txt, its rows in MODULE.csv.
define bench
	$(BIN)/python -m benchmarks.$(1) $(2) --csv build/bench/$(1).csv | tee build/bench/$(1).txt
endef

bench: $(READY) ## Run the benchmarks one after another, into build/bench (hours)
	@mkdir -p build/bench
	$(call bench,demo)
	$(call bench,runtime_peers)
	$(call bench,architectures)
	$(call bench,planning_time)
	$(call bench,loops)
	$(call bench,regions)
	$(call bench,swap_runtime)
	$(call bench,roofline_error)
	$(BIN)/python -m benchmarks.soak --minutes 10 | tee build/bench/soak.txt
ifneq ($(wildcard $(DATA)),)
	$(call bench,placement,$(DATA)/allocation)
	$(call bench,plan_quality,$(DATA)/graphs --graphs resnet32$(comma)unet$(comma)densenet121$(comma)transformer)
	$(call bench,swap_table,$(DATA)/graphs)
	$(call bench,baselines,$(DATA)/graphs)
	$(BIN)/python -m benchmarks.exact table $(DATA)/graphs | tee build/bench/optima.txt
	$(BIN)/python -m benchmarks.exact traces $(DATA)/graphs --time-limit 60 | tee build/bench/traces.txt
	$(BIN)/python -m benchmarks.exact tight $(DATA)/graphs/unet.json | tee build/bench/tight.txt
else
	@echo "no $(DATA): benchmarks of recorded graphs were left out (make bench DATA=FOLDER)"
endif

fits: $(READY) ## Compare published memory of training setups with the counts of `coop-plan fit`
	$(BIN)/python -m benchmarks.fits --smallest

budgets: $(READY) ## Write docs/budgets.md: bytes asked and got by means to limit memory (an hour)
	$(BIN)/python -m benchmarks.budgets --output docs

papers: $(READY) ## Write docs/papers*.md: the papers' figures with ours (half an hour)
	$(BIN)/python -m benchmarks.papers --output docs

# Packages that a machine with Python 3.12 and PyTorch lacks (benchmarks/gpu_step.py).
GPU_WHEELS := msgspec click rich markdown-it-py mdurl \
  Pygments pytest pluggy iniconfig packaging

gpu-bundle: $(READY) ## Collect the wheels for the checks on a GPU machine into .gpu
	rm -rf .gpu
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
	  --implementation cp --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
	  --constraint constraints.txt --dest .gpu $(GPU_WHEELS)
	COOP_PLAN_KERNELS=0 $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir .gpu .
	@du -sh .gpu

# Images whose publishers move their tags. That of the service is pinned where it is pushed.
IMAGES := python:3.11-slim redis:7-alpine nginx:1-alpine

digests: ## Pin the images of docker/ by digest, for a release (needs docker and a registry)
	@for image in $(IMAGES); do \
	  digest=$$(docker buildx imagetools inspect --format '{{.Manifest.Digest}}' $$image) || exit; \
	  sed -i -E "s|$$image(@sha256:[0-9a-f]+)?|$$image@$$digest|" docker/Dockerfile docker/*.yaml \
	    docker/kubernetes/*.yaml; \
	  echo "$$image@$$digest"; \
	done

# The mark is written last, so an interrupted set-up is resumed.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "coop-plan needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[client,server,cluster,otel,exact,plot,torch,demo,dev]'
	$(BIN)/python -m compileall -q $(FOLDERS)  # as pip does for a wheel: else every start compiles
	@touch $(READY)

# PyPI has these versions for CUDA alone (6 GB each); they run without a device, with an older setuptools.
.venv-%/.ready: requirements-%.txt constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv-$*
	@mkdir -p build
	sed '/^torch==/d; /^setuptools==/d' constraints.txt > build/$*.txt
	.venv-$*/bin/python -m pip install --quiet --constraint build/$*.txt --requirement requirements-$*.txt \
	  --editable '.[client,server,torch,demo]' \
	  accelerate lightning peft hypothesis pytest pytest-rerunfailures pytest-timeout pytest-xdist
	@touch $@

clean: ## Remove .venv and build outputs
	rm -rf .venv $(OLDEST) $(NEWEST) build *.egg-info
