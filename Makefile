# Copyright the Relume authors. SPDX-License-Identifier: Apache-2.0
# Every target is explained by `make help`; ARGS="..." is passed on, e.g. make demo ARGS=--help

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# Our processes start by the hundred in the tests: they compile each module once, whatever the caller's environment says.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
# The one etcd every process of a target uses; get-etcd.sh says why it took or refused one.
WITH_ETCD = RELUME_ETCD="$$(deploy/dev/get-etcd.sh)"; export RELUME_ETCD
# The three tiers, by the marks of pyproject.toml.
TIER = $(BIN)/python -m tests.suite.tiers
# What comes before the tests, two at a time.
CHECKED = $(MAKE) -j2 --output-sync=target lint wheel collect

.PHONY: help env models demo up check test test-full soak chaos chaos-nightly fuzz-nightly lint collect docs wheel bench lock clean

help: ## show this list
	@echo "Relume keeps a fleet of vLLM workers answering through failures."
	@echo "On a fresh Linux machine with Python 3.11 to 3.13, start with: make demo"
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | column -t -s '|'

env: ## make or update .venv (vLLM's CPU build, our dependencies, relume itself), with its packages in ~/.cache/relume
	@deploy/dev/setup-env.sh

models: env ## make the tiny seeded model in .relume/models
	@$(BIN)/python deploy/dev/make_model.py

demo: models ## start a fleet, kill a worker under load, show that no stream broke
	@$(WITH_ETCD); exec $(BIN)/relume demo $(ARGS)

up: models ## start a fleet of three workers and leave it running until Ctrl-C
	@$(WITH_ETCD); exec $(BIN)/relume up $(ARGS)

check: lint ## the fast loop, without etcd or engines: linters, types, unit tests (2 minutes)
	@exec $(TIER) check $(ARGS)

test: models ## check, the wheel, tests on real etcd, and the core on real vLLM (10 minutes on two cores)
	@$(CHECKED)
	@$(WITH_ETCD); exec $(TIER) test $(ARGS)

test-full: models ## every test there is, and make chaos (half an hour to 100 minutes on two cores)
	@$(CHECKED)
	@$(WITH_ETCD); exec $(TIER) full $(ARGS)
	@$(if $(ARGS),,$(MAKE) chaos)

soak: models ## repeat tests (default: the core) beside busy processes: make soak ARGS="SELECTION --times 20"
	@$(WITH_ETCD); exec $(BIN)/python -m tests.suite.soak $(ARGS)

chaos: models ## faults on real processes, a CI-sized set (2 to 12 minutes)
	@$(WITH_ETCD); exec $(BIN)/python -m relume.chaos.live $(or $(ARGS),--set ci)

chaos-nightly: models ## every applicable fault on real processes, three seeds each (more than half an hour)
	@$(WITH_ETCD); exec $(BIN)/python -m relume.chaos.live --set nightly --seeds 3 --out .relume/nightly $(ARGS)

fuzz-nightly: env ## 1,000 seeds of simulated fleets; fails too if no run reaches a guard of the product (a quarter of an hour on two cores)
	@exec $(BIN)/relume-chaos fuzz --seeds 1000 --guards --limit 120s $(ARGS)

lint: env ## ruff, mypy, the arrows between packages, spelling, the documentation site
	@$(BIN)/ruff check .
	@$(BIN)/python -m mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python -m codespell_lib
	@$(BIN)/python -m mkdocs build --strict 2>&1 | { grep -v '^INFO' || true; }

collect: env ## find every test, and compile its module
	@found="$$($(BIN)/python -m pytest --collect-only -q 2>&1)" || { tail -n 40 <<<"$$found"; exit 1; }
	@echo "collect: every module of tests can be read"

docs: env ## write the generated documents anew and build the site into .relume/site
	@$(BIN)/python -m deploy.docs.generate
	@$(BIN)/python -m mkdocs build --strict

wheel: env ## build the wheel and try it with the checkout off the path
	@deploy/dev/check_wheel.sh

bench: models ## run one bench: make bench ARGS=NAME (without a name: list them)
	@$(WITH_ETCD); exec $(BIN)/relume-chaos bench $(ARGS)

lock: env ## write deploy/dev/lock.txt anew from what is installed
	@$(BIN)/python deploy/dev/requirements.py lock >deploy/dev/lock.txt.new
	@mv deploy/dev/lock.txt.new deploy/dev/lock.txt

clean: ## remove caches, build products, models and run files; keeps .venv
	@! $(BIN)/relume status >/dev/null 2>&1 || { echo "a fleet runs from here: end it first (Ctrl-C in its terminal)"; exit 1; }
	@rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .grimp_cache .hypothesis .relume
	@find . -path ./.venv -prune -o -path ./.git -prune -o -name __pycache__ -type d -print0 | xargs -0 -r rm -rf
