# Quire. `make help` lists the targets; CI runs `make test`.

VENV ?= .venv
PYTHON ?=
TORCH_INDEX ?=
EXTRA ?= $(if $(wildcard /dev/nvidiactl),gpu,worker)

# make run, make chat
PORT ?= 8000
MODEL ?= smollm2
WORKERS ?= 1
ARGS ?=

PY := "$(VENV)/bin/python"
INSTALL = PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" deploy/install.sh "$(VENV)"

.DEFAULT_GOAL := help
.PHONY: help install run chat test test-fast test-full test-docker lint format proto docs bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  make run takes PORT=$(PORT) MODEL=$(MODEL) WORKERS=$(WORKERS) ARGS=\"--flag value\""
	@echo "  TORCH_INDEX= chooses where torch comes from, VENV= and PYTHON= the environment"

install: ## make the virtual environment that `run` uses
	@$(INSTALL) $(EXTRA)

run: install ## serve a model: fetches it, starts a router and workers
	@exec "$(VENV)/bin/quire" serve --port "$(PORT)" --model "$(MODEL)" --workers "$(WORKERS)" $(ARGS)

chat: install ## talk to the server that `make run` started
	@exec "$(VENV)/bin/quire" chat "http://127.0.0.1:$(PORT)" $(ARGS)

.PHONY: install-dev
install-dev:
	@$(INSTALL) dev

test: install-dev lint ## lint, types and every test that this machine can run
	$(PY) -m pytest -m "not gpu and not docker and not full"

test-fast: install-dev ## the fast tests: no model, no browser
	$(PY) -m pytest -m "not gpu and not docker and not full and not slow"

test-full: install-dev ## the random tests at their full size
	QUIRE_TEST_FULL=1 $(PY) -m pytest -m "not gpu and not docker"

test-docker: install-dev ## the tests with a Docker engine: the host's, or one started for them (Debian, root)
	tests/deploy/with_engine.sh $(PY) -m pytest -m docker tests/deploy

lint: install-dev ## ruff and strict mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: install-dev ## let ruff format and mend
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

proto: install-dev ## regenerate the gRPC code from proto/worker.proto
	$(PY) -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. proto/worker.proto

docs: install-dev ## regenerate docs/configuration.md from the settings
	$(PY) -m deploy.configuration_docs

bench: install-dev ## the benchmarks that need no GPU
	$(PY) -m bench

.PHONY: images
images: ## build the container images that docker-compose.yml names (IMAGE_ARGS="--build-arg NAME=VALUE")
	DOCKER_BUILDKIT=1 docker build -f deploy/docker/router.Dockerfile -t quire/router:0.1.0 $(IMAGE_ARGS) .
	DOCKER_BUILDKIT=1 docker build -f deploy/docker/worker-cpu.Dockerfile -t quire/worker-cpu:0.1.0 $(IMAGE_ARGS) .

.PHONY: image-gpu
image-gpu: ## build the GPU worker's image (IMAGE_ARGS="--build-arg CUDA_ARCHS=9.0a" for one kind of GPU)
	DOCKER_BUILDKIT=1 docker build -f deploy/docker/worker-gpu.Dockerfile -t quire/worker-gpu:0.1.0 $(IMAGE_ARGS) .

clean: ## remove the environment and every generated file that git ignores
	rm -rf "$(VENV)" build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
