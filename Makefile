# Two commands: `make demo` and `make test`. Both make .venv on their first call and reuse it.

PYTHON ?= python3
VENV := .venv
# Model Runner V2 is vLLM's default on a GPU; its CPU build has to be told.
export VLLM_USE_V2_MODEL_RUNNER ?= 1

.PHONY: demo test lint setup clean

demo: setup
	$(VENV)/bin/python examples/offline.py

test: setup
	$(VENV)/bin/pytest

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

setup:
	@$(PYTHON) tools/setup_env.py --venv $(VENV)

clean:
	rm -rf $(VENV) build *.egg-info
