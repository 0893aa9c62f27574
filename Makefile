# Everything a person types. `make` alone lists the targets.
#
# The virtual environment is filled in two layers, each with a stamp file, so that a second run starts at once:
# what serving needs, and on top of it what development needs.

VENV ?= .venv
# The first Python that is recent enough; PYTHON=… chooses another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && { echo $$p; break; }; done)
# Another torch than the default, for example TORCH_SPEC=torch==2.12.0.
TORCH_SPEC ?=
MODEL ?=
PORT ?=
ARGS ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help serve chat pull models test test-unit test-clients lint format chaos load bench-peers install install-dev clean

help: ## list the targets
	@echo 'Usage: make TARGET [VARIABLE=value]'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' $(firstword $(MAKEFILE_LIST)) | \
		while IFS='|' read -r name text; do printf '  %-14s %s\n' "$$name" "$$text"; done

serve: install ## start the server: MODEL=<name, folder, .gguf file or hub id> PORT=8000 ARGS='--flag value'
	@exec $(BIN)/tokenloom serve $(if $(MODEL),'$(MODEL)') $(if $(PORT),--port $(PORT)) $(ARGS)

chat: install ## chat with the running server in the terminal: PORT=8000
	@exec $(BIN)/tokenloom chat $(if $(PORT),--url http://127.0.0.1:$(PORT)) $(ARGS)

test: lint pull ## check the style and run all tests: PYTEST_ARGS='tests/unit -k name'
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-unit: install-dev ## run the tests that need neither torch nor sockets; seconds
	@$(BIN)/python -m pytest tests/unit $(PYTEST_ARGS)

test-clients: install-dev ## run real client programs against a server; each gets an environment of its own
	@$(BIN)/python -m pytest tests/clients $(PYTEST_ARGS)

lint: install-dev ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: install-dev ## put the source into the project's format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

pull: install ## fetch a model of the catalogue ahead of time; the default one without MODEL=name
	@$(BIN)/tokenloom pull $(MODEL)

models: install ## list the models known by name
	@$(BIN)/tokenloom models

chaos: install-dev pull ## kill, freeze and stop real processes, and check what clients see
	@$(BIN)/python -m pytest $(addprefix tests/integration/test_,faults_api.py faults_web.py worker_wire.py serve.py \
		serve_supervisor.py) $(PYTEST_ARGS)

load: install-dev ## load a running server with locust: PORT=8000 ARGS='--users 16 --run-time 1m'
	@$(BIN)/locust --headless --only-summary -f tests/load/locustfile.py \
		--host http://127.0.0.1:$(or $(PORT),8000) $(or $(ARGS),--users 16 --spawn-rate 16 --run-time 1m)

bench-peers: install-dev pull ## compare with `transformers serve` on this machine
	@$(BIN)/python tests/load/compare_peers.py $(ARGS)

install: $(VENV)/.serve.stamp ## install what serving needs into .venv

install-dev: $(VENV)/.dev.stamp ## install what development needs into .venv

$(VENV)/.python.stamp:
	@test -n '$(PYTHON)' || { echo 'Tokenloom needs Python 3.11, 3.12 or 3.13; name one with PYTHON=…' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
		{ echo 'Tokenloom needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is another; name one with PYTHON=…' >&2; exit 1; }
	@echo 'Making the virtual environment $(VENV)'
	@$(PYTHON) -m venv $(VENV) || { echo 'Could not make one (on Debian: apt install python3-venv)' >&2; exit 1; }
	@touch $@

$(VENV)/.serve.stamp: $(VENV)/.python.stamp pyproject.toml deploy/install_torch.py
	@$(BIN)/python deploy/install_torch.py $(if $(TORCH_SPEC),'$(TORCH_SPEC)')
	@echo 'Installing what serving needs (minutes, once)'
	@$(PIP) --editable '.[worker,web]'
	@touch $@

$(VENV)/.dev.stamp: $(VENV)/.serve.stamp
	@echo 'Installing what development needs'
	@$(PIP) --editable '.[worker,web,bench,test,lint]'
	@touch $@

clean: ## remove the virtual environment and every cache inside the checkout; models stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info artifacts
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
