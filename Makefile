# `make demo` and `make test` set everything up on first use. On a machine without a GPU, UV_TORCH_BACKEND=cpu makes
# uv take PyTorch's CPU build instead of the CUDA one.
PYTHON ?= python3.12
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lint format lock clean

demo: $(READY)  ## Train, kill, resume, merge, publish: the whole pipeline in minutes, on a CPU
	$(BIN)/python deployments/demo/run.py

test: $(READY)  ## All tests, slow ones included, two files at a time
	$(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

lint: $(READY)  ## What pre-commit and CI check
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

lock:  ## Resolve the pins again. CUDA libraries are left out: torch's own metadata pins them
	uv pip compile pyproject.toml --extra dev --no-header --no-annotate --no-emit-index-url --quiet \
		--constraint constraints.txt | grep -vE '^(nvidia-|cuda-|triton)' > requirements.lock

clean:
	rm -rf .venv runs

$(READY): requirements.lock requirements-nodeps.lock pyproject.toml
	@if command -v uv >/dev/null; then \
		set -ex; uv venv --quiet --allow-existing --python 3.12 .venv; \
		uv pip install --quiet --compile-bytecode --python $(BIN)/python -r requirements.lock; \
		uv pip install --quiet --compile-bytecode --python $(BIN)/python --no-deps -r requirements-nodeps.lock -e .; \
	else \
		set -ex; $(PYTHON) -m venv .venv; \
		$(BIN)/python -m pip install --quiet -r requirements.lock; \
		$(BIN)/python -m pip install --quiet --no-deps -r requirements-nodeps.lock -e .; \
	fi
	@touch $(READY)
