# Trimtab. `make` lists the targets; `make up` is the whole mesh on this machine.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

# The first interpreter of a supported version that can make virtual environments.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null && echo $$p && break; done)

# Where tests look for promtool, beside PATH: this user's cache directory, as the converted model's is.
PROMTOOL_DIR = $${TRIMTAB_CACHE_DIR:-$${XDG_CACHE_HOME:-$$HOME/.cache}/trimtab}/prometheus

.PHONY: help setup lock proto boards promtool baseline check test test-fast test-v4 up bench-overhead bench-mixed bench-scheduler bench-reports bench-long-prompt bench-push bench-soak bench-gateway bench-peers bench-loops bench-policy-latency bench-blocks bench-reblock bench-sizing drill-streams drill-leavers drill-burst drill-leak drill-hang drill-oom drill-exhaustion drill-giants drill-giants-v4 drill-inversion drill-silence drill-restart drill-hosts clean clean-cache

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F '\t' '{ printf "  make %-21s %s\n", $$1, $$2 }'
	@echo 'ARGS="..." is handed on to up, test, bench and drill; TRIMTAB_ACCELERATOR=cpu|gpu chooses the engine of setup.'

setup: ## make .venv, install everything, fetch the default model (does nothing when up to date)
	@test -n '$(PYTHON)' || { echo 'setup: no Python 3.11 to 3.14 found; install one, or: make setup PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) tools/setup.py

lock: ## resolve requirements/constraints*.txt; what is pinned stays, but with ARGS=--upgrade
	@$(PYTHON) tools/setup.py --lock $(ARGS)

proto: ## generate trimtab/v1 from protos/
	@$(BIN)/python tools/generate.py

boards: ## write deploy/grafana/*.json from their sources
	@$(BIN)/python tools/boards.py

promtool: ## fetch promtool (Debian's, 19 MB) into the user's cache directory: the tests of rules use it
	@to="$(PROMTOOL_DIR)"; if test -x "$$to/promtool"; then echo "promtool: $$to/promtool is there"; exit 0; fi; \
	  command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || { echo 'promtool: no apt-get here; put promtool (2.42 or newer) on PATH' >&2; exit 1; }; \
	  tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; cd "$$tmp"; apt-get download -qq prometheus 2>/dev/null \
	    || { echo 'promtool: apt-get found no package prometheus; try apt-get update first' >&2; exit 1; }; \
	  dpkg-deb -x prometheus_*.deb . && mkdir -p "$$to" && install usr/bin/promtool "$$to/promtool" && echo "promtool: $$to/promtool"

baseline: ## take the protos as they are for what `make check` compares against
	@$(BIN)/buf build -o protos/baseline.binpb

check: setup ## lint, formats, types, layers, protos, generated code
	@echo '==> ruff check: lint';              $(BIN)/ruff check --output-format concise .
	@echo '==> ruff format: layout';           $(BIN)/ruff format --check .
	@echo '==> mypy: types, strict';           $(BIN)/mypy; $(BIN)/mypy tools/*.py
	@echo '==> lint-imports: who may import whom'; $(BIN)/lint-imports
	@echo '==> buf lint: the wire contract';   $(BIN)/buf lint
	@echo '==> buf format: its layout';        $(BIN)/buf format -d --exit-code
	@if test -f protos/baseline.binpb; then \
	  echo '==> buf breaking: against protos/baseline.binpb'; $(BIN)/buf breaking --against protos/baseline.binpb; fi
	@echo '==> generate --check: trimtab/v1 is what the protos give'; $(BIN)/python tools/generate.py --check

# Side by side by few processes, and those of vLLM alone at the end (tests/workers.py): a machine that is new and busy has no time to spare.
test: setup ## every test, those with a real vLLM included
	@echo '==> pytest'; $(BIN)/python -m pytest --all -n3 --durations=10 $(ARGS) || { \
	  code=$$?; test $$code -eq 1 || exit $$code; \
	  echo '==> pytest: what failed, once more and alone, since on a busy machine a time may run out'; \
	  $(BIN)/python -m pytest --all -n0 --last-failed --last-failed-no-failures=none $(ARGS); }

test-fast: setup ## the tests that need no vLLM and little time: a good minute
	@echo '==> pytest, without vLLM and without what is slow'; $(BIN)/python -m pytest -m 'not vllm' --durations=10 $(ARGS)

test-v4: setup ## the mesh on DeepSeek-V4's architecture, in miniature: four minutes, not among `test`
	@echo '==> pytest, DeepSeek-V4'; TRIMTAB_V4=1 $(BIN)/python -m pytest tests/vllm/dsv4 -n0 --durations=10 $(ARGS)

up: setup ## the whole mesh on this machine
	@$(BIN)/trimtab up $(ARGS)

bench-overhead: setup ## what the mesh costs next to plain vLLM
	@$(BIN)/trimtab bench overhead $(ARGS)

bench-mixed: setup ## realtime and batch on one engine, by FCFS, priority and our scheduler
	@$(BIN)/trimtab bench mixed $(ARGS)

bench-scheduler: setup ## what scheduling costs per engine step, without a model
	@$(BIN)/trimtab bench scheduler $(ARGS)

bench-reports: setup ## what measuring and reporting cost a worker
	@$(BIN)/trimtab bench reports $(ARGS)

bench-long-prompt: setup ## what one long prompt does to streams that decode beside it
	@$(BIN)/trimtab bench long-prompt $(ARGS)

bench-push: setup ## from a policy's put to its holding in up to a thousand nodes
	@$(BIN)/trimtab bench push $(ARGS)

bench-loops: setup ## a burst on a real mesh with the loops on and off, under our scheduler and under FCFS
	@$(BIN)/trimtab bench loops $(ARGS)

bench-soak: setup ## ten minutes of ten puts a second to 200 nodes: what every process's memory does
	@$(BIN)/trimtab bench soak $(ARGS)

bench-gateway: setup ## what a token costs a gateway, by one stream per worker and by one per request
	@$(BIN)/trimtab bench gateway $(ARGS)

bench-peers: setup ## our HTTP door and SMG before the same worker with vLLM: ARGS='--smg PATH'
	@$(BIN)/trimtab bench peers $(ARGS)

bench-policy-latency: setup ## how long an engine takes to acknowledge a policy
	@$(BIN)/trimtab bench policy-latency $(ARGS)

bench-blocks: setup ## what each KV block size is worth in speed, memory and prefixes found again
	@$(BIN)/trimtab bench blocks $(ARGS)

bench-reblock: setup ## what a change of the KV block size does to running streams
	@$(BIN)/trimtab bench reblock $(ARGS)

bench-sizing: setup ## memory and CPU of each process, by nodes and by streams
	@$(BIN)/trimtab bench sizing $(ARGS)

drill-streams: setup ## workers killed, stopped, cut off and drained under a thousand streams
	@$(BIN)/trimtab drill streams $(ARGS)

drill-leavers: setup ## ten thousand clients that leave in every phase
	@$(BIN)/trimtab drill leavers $(ARGS)

drill-burst: setup ## four times as many realtime requests for a minute
	@$(BIN)/trimtab drill burst $(ARGS)

drill-leak: setup ## KV blocks that nobody gives back: the loop restarts the worker
	@$(BIN)/trimtab drill leak $(ARGS)

drill-hang: setup ## an engine that stops within a step: the loop restarts the worker
	@$(BIN)/trimtab drill hang $(ARGS)

drill-oom: setup ## an engine that runs out of memory, and one with too few KV blocks
	@$(BIN)/trimtab drill oom $(ARGS)

drill-exhaustion: setup ## more BATCH than the KV cache holds: the loop lets it in later
	@$(BIN)/trimtab drill exhaustion $(ARGS)

drill-giants: setup ## prompts of giant length in the mix: the loop keeps them apart
	@$(BIN)/trimtab drill giants $(ARGS)

drill-giants-v4: setup ## one prompt of 100,000 tokens to DeepSeek-V4's architecture, in miniature: half an hour
	@$(BIN)/trimtab drill giants --v4 --model "$$($(BIN)/python -m tests.vllm.dsv4.tiny_model)" --plugin-path tests/vllm/dsv4/plugin $(ARGS)

drill-inversion: setup ## an engine that serves batch first: the loop tells it its policy again
	@$(BIN)/trimtab drill inversion $(ARGS)

drill-silence: setup ## a worker that serves and is not heard: no loop acts on a guess
	@$(BIN)/trimtab drill silence $(ARGS)

drill-restart: setup ## workers started anew one after another, with other settings
	@$(BIN)/trimtab drill restart $(ARGS)

drill-hosts: setup ## links between hosts cut under load, with mTLS (network namespaces)
	@$(BIN)/trimtab drill hosts $(ARGS)

clean: ## remove build outputs and tool caches (.venv and the model stay)
	@rm -rf dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0r rm -rf

clean-cache: ## list and remove the converted model in the user's cache directory
	@test -x $(BIN)/python || { echo 'clean-cache: .venv is missing; run make setup first' >&2; exit 1; }
	@$(BIN)/python -m services.worker.model remove
