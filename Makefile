# Slipstream's verbs. `make` alone lists them. Everything installs itself into .venv from the pyproject.toml
# files and constraints.txt; nothing else is needed on a machine with Python 3.11, make and a C compiler.
PYTHON ?= $(shell command -v python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
.DEFAULT_GOAL := help
# Tests start hundreds of processes. Each would compile all modules again: about a second of processor time.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help demo test soak smoke test-gpu gpu-report test-k8s test-console test-clients test-images check fix protos up chat status down bench train install native wheels lock images images-report clean

# mypy keeps one core busy for two minutes: `make check test` runs the two side by side, and test_repo.py once.
ifneq (,$(and $(filter check,$(MAKECMDGOALS)),$(filter test,$(MAKECMDGOALS))))
MAKEFLAGS += -j2
REPO_TESTS :=
else
REPO_TESTS := $(BIN)/python -m pytest -q tests/test_repo.py
endif

help: ## list the verbs
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  \1\t/' | expand -t 14

$(VENV)/.local: pyproject.toml server/pyproject.toml server/setup.py constraints.txt scripts/setup.sh
	@PYTHON=$(PYTHON) VENV=$(VENV) sh scripts/setup.sh local
$(VENV)/.dev: pyproject.toml server/pyproject.toml server/setup.py constraints.txt scripts/setup.sh
	@PYTHON=$(PYTHON) VENV=$(VENV) sh scripts/setup.sh dev

install: $(VENV)/.local ## set up .venv with everything the local cluster needs

demo: $(VENV)/.local native ## run the whole cluster and a scripted agent conversation
	@$(BIN)/python -m bench.demo

test: $(VENV)/.dev native ## every test that needs no GPU
	@$(BIN)/python -m pytest -q --processes 5

soak: $(VENV)/.dev native ## the property tests with 500 examples each, then the long forms of the fault suites; hours
	@$(BIN)/python -m pytest -q -m 'hypothesis and not (gpu or soak)' --hypothesis-profile thorough --processes 2 --timeout 14400
	@$(BIN)/python -m pytest -q -m soak --timeout 14400

smoke: $(VENV)/.dev native ## the tiny test of everything, under 10 s
	@$(BIN)/python -m pytest -q tests/test_smoke.py

test-gpu: $(VENV)/.dev ## tests that need a CUDA device; says so where there is none
	@$(BIN)/python -m pytest -q -m gpu tests/gpu

gpu-report: $(VENV)/.dev native ## kernels, peers, whole steps, accuracy and boot on a CUDA device, in nine minutes; without one they are compiled for sm_90 only
	@$(BIN)/python -m bench.gpu $(ARGS)

test-k8s: $(VENV)/.dev native ## deploy/k8s, and its end-to-end suite on the cluster that KUBECONFIG names
	@$(BIN)/python -m pytest -q -m 'k8s or not k8s' tests/k8s

test-console: $(VENV)/.dev native ## the console in Chromium; ARGS=--screenshots writes the images of docs/console.md again
	@$(BIN)/python -c 'import playwright' 2>/dev/null || PIP_CONSTRAINT=$(VENV)/.constraints.txt $(BIN)/python -m pip -q --disable-pip-version-check install -e 'server[browser]' || true
	@if $(BIN)/python -c 'import playwright' 2>/dev/null; then $(BIN)/python -m pytest -q -m browser tests/router/console/browser $(ARGS); \
	else echo "console: playwright is missing and cannot be installed, so nothing was tested"; fi

test-clients: $(VENV)/.dev native ## client libraries of others: OpenAI's, Anthropic's, litellm, LangChain, Vercel's and more
	@PYTHON=$(PYTHON) sh scripts/setup_clients.sh
	@$(BIN)/python -m pytest -q -m clients tests/clients $(ARGS)

test-images: $(VENV)/.dev ## build the images and run a cluster of them; needs root, buildah and runc
	@$(BIN)/python -m pytest -q -m images tests/images

check: $(VENV)/.dev ## formatting, lint, types, import rules, protos, docs
	@$(BIN)/ruff format --check -q .
	@$(BIN)/ruff check -q .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/buf lint protos
	@if [ -f protos/released.binpb ]; then $(BIN)/buf breaking protos --against protos/released.binpb; \
	else echo "protos: no release yet, so no contract to compare with"; fi
	@$(BIN)/python scripts/gen_protos.py --check
	@$(REPO_TESTS)

fix: $(VENV)/.dev ## format and repair what can be repaired
	@$(BIN)/ruff format -q .
	@$(BIN)/ruff check -q --fix .

protos: $(VENV)/.dev ## regenerate the stubs in slipstream/ from protos/
	@$(BIN)/python scripts/gen_protos.py

up: $(VENV)/.local native ## start the cluster and keep it in the foreground
	@$(BIN)/slipstream up

chat: $(VENV)/.local ## talk to the running cluster, as a customer of the help desk
	@$(BIN)/slipstream chat --tools docs/examples/tools.json --system "You answer the customers of Blue Harbor. Be warm and polite."

status: $(VENV)/.local ## show workers, load and sessions of the running cluster
	@$(BIN)/slipstream status

down: $(VENV)/.local ## stop the running cluster
	@$(BIN)/slipstream down

bench: $(VENV)/.dev native ## engine, acceptance and serving benchmarks
	@$(BIN)/python -m bench.engine --make .cache/bench-model --model .cache/bench-model --peer transformers --repeats 1
	@$(BIN)/python -m bench.acceptance
	@$(BIN)/python -m bench.serve --up

train: $(VENV)/.local native ## train the shipped model and its draft head again, from the seed
	@$(BIN)/python -m models.train

# Set-up compiles the C libraries; this compiles again what changed since, and is quick when nothing did.
native: ## compile the C libraries whose sources changed
	@$(PYTHON) server/native_build.py

wheels: $(VENV)/.dev ## build the wheels of the SDK and of the server into dist/
	@rm -rf build server/build dist # else files that no longer exist would get in
	@SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct 2>/dev/null || date +%s)} \
	$(BIN)/python -m pip --disable-pip-version-check wheel -q --no-deps --no-build-isolation -w dist . ./server

images: $(VENV)/.dev ## build the images with buildah, podman or docker; ARGS="router decode": these tiers only
	@PYTHON=$(BIN)/python sh scripts/images.sh $(ARGS)

images-report: $(VENV)/.local ## size and start time of each image; needs root, buildah and runc
	@$(BIN)/python -m bench.images $(ARGS)

lock: $(VENV)/.dev ## write constraints.txt from what is installed
	@$(BIN)/pip freeze --exclude-editable | grep -v '^slipstream' | sed 's/^torch==.*/torch==2.13.0/' > constraints.txt

clean: ## remove .venv, caches and run directories
	@rm -rf $(VENV) .venv-clients tests/clients/node/node_modules .cache .run build dist server/build *.egg-info
	@find libs services -name '*.so' -delete -o -name '*.digest' -delete
