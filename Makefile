VENV ?= .venv
PY := $(VENV)/bin/python

.PHONY: proto
proto: ## regenerate the gRPC code from proto/worker.proto
	$(PY) -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. proto/worker.proto
