# Everything a newcomer needs: `make` lists it.
# Variables: PYTHON=python3.12 chooses the interpreter; PIP_ARGS="--extra-index-url ..." adds options to pip install;
# QUICK=1 shortens a benchmark; ARGS="..." adds options to `tritone serve`, `demo` and `evaluate`.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
REQUIREMENTS := requirements/runtime.txt requirements/nodeps.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check
ARGS ?=
PIP_ARGS ?=
QUICK ?=
# Idle compute threads spin for some microseconds only, where the cores are few.
export OMP_WAIT_POLICY := PASSIVE
export GOMP_SPINCOUNT := 1000

.DEFAULT_GOAL := help
.PHONY: help demo serve test lint soak clean doctor prepare evaluate train-voice evaluate-voice

help: ## this list
	@grep -hE '^[a-z%-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z%-]+):.*## /  make \1\t/; s/%/X/' | expand -t 20

demo: $(VENV)/runtime.stamp ## install, prepare, start a server, ask a question, write out/demo.wav, stop
	@$(BIN)/tritone demo $(ARGS)

serve: $(VENV)/runtime.stamp ## start a server and keep it until Ctrl-C; talk to it with .venv/bin/tritone chat
	@exec $(BIN)/tritone serve $(ARGS)

prepare: $(VENV)/runtime.stamp ## make the checkpoint and the voice that the server needs
	@$(BIN)/tritone prepare $(ARGS)

doctor: $(VENV)/runtime.stamp ## say what is missing on this machine
	@$(BIN)/tritone doctor $(ARGS)

test: lint ## every test: style, types, units, and a real server
	$(BIN)/python -m pytest -n auto --maxprocesses=4 --dist loadfile tests/unit
	$(BIN)/python -m pytest tests/server

lint: $(VENV)/test.stamp ## style and types
	$(BIN)/ruff check .
	$(BIN)/mypy

bench-%: $(VENV)/test.stamp ## a benchmark, perf/bench_X.py; QUICK=1 for a short one
	@test -f perf/bench_$*.py || { echo "no such benchmark; there are:" $$(ls perf/bench_*.py 2>/dev/null | sed -E 's/.*bench_(.*)\.py/\1/'); exit 2; }
	@$(BIN)/python -m perf.bench_$* $(if $(QUICK),--quick) $(ARGS)

evaluate: $(VENV)/test.stamp ## what each precision costs in accuracy, on real text and tasks; about 15 minutes
	@$(BIN)/tritone evaluate $(if $(QUICK),--quick) $(ARGS)

train-voice: $(VENV)/test.stamp ## train the demo's voice anew: under three hours of one core; goes on where it was stopped
	@OMP_NUM_THREADS=1 MALLOC_ARENA_MAX=1 ONEDNN_PRIMITIVE_CACHE_CAPACITY=100 $(BIN)/python -m training.voice.train $(ARGS)

evaluate-voice: $(VENV)/test.stamp ## word errors and speed of the trained voice through a whole server, heard by Whisper
	@$(BIN)/python -m training.voice.evaluate $(ARGS)

soak: $(VENV)/test.stamp ## a long run with many clients; QUICK=1 for a short one
	@$(BIN)/python -m perf.soak $(if $(QUICK),--quick)

clean: ## remove the environment and everything made: .venv, .cache, out
	rm -rf $(VENV) .cache out .mypy_cache .ruff_cache .pytest_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/runtime.stamp: $(REQUIREMENTS) pyproject.toml requirements/make_venv.sh
	@PYTHON="$(PYTHON)" requirements/make_venv.sh $(VENV)
	$(PIP) install -q $(PIP_ARGS) -r requirements/runtime.txt
	$(PIP) install -q $(PIP_ARGS) --no-deps -r requirements/nodeps.txt
	$(PIP) install -q $(PIP_ARGS) --no-deps -e .
	@touch $@

$(VENV)/test.stamp: $(VENV)/runtime.stamp requirements/test.txt requirements/evaluate.txt requirements/test-nodeps.txt
	$(PIP) install -q $(PIP_ARGS) -r requirements/test.txt
	$(PIP) install -q $(PIP_ARGS) --no-deps -r requirements/test-nodeps.txt
	@touch $@
