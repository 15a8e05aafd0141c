# Two commands: `make demo` and `make test`. Both make .venv on their first call and reuse it.

PYTHON ?= python3
VENV := .venv
# Model Runner V2 is vLLM's default on a GPU; its CPU build has to be told.
export VLLM_USE_V2_MODEL_RUNNER ?= 1

.PHONY: demo test test-fast contract targets emulated-gpu test-emulated-gpu compare-emulated-gpu first-drafter two-heads lint types setup clean

demo: setup
	$(VENV)/bin/python examples/demo.py

# Processes that test side by side. They keep their engines: two take 13 GB together.
WORKERS ?= 2

# Where kernels are interpreted they cannot be compiled: that takes processes of its own.
COMPILED := tests/triton_kernels/test_compile.py
# Half of the engines. With the other half they would take 22 GB, since a process keeps its engines.
APART := tests/engine/baselines tests/engine/runner
# Named to pytest, APART would import vLLM in the process for which the workers wait.
OTHERS := $(filter-out $(APART) tests/engine,$(wildcard tests/* tests/engine/*))
test: setup
	$(VENV)/bin/pytest --numprocesses $(WORKERS) --dist worksteal \
		$(addprefix --ignore ,$(APART)) --ignore $(COMPILED)
	$(VENV)/bin/pytest --numprocesses $(WORKERS) --dist worksteal $(addprefix --ignore ,$(OTHERS))
	$(VENV)/bin/pytest --numprocesses $(WORKERS) $(COMPILED)

# Without engines: what a change of trees, kernels, heads or training breaks shows here already.
test-fast: setup
	$(VENV)/bin/pytest --numprocesses $(WORKERS) --dist worksteal --ignore tests/engine \
		--ignore $(COMPILED) -m "not engine" $(COVERAGE)

# What the plugin leans on in vLLM, held against the installed one, or against the sources of any
# other: make contract VLLM=0.33.0. Nothing of it is run.
contract: setup
	$(VENV)/bin/python tools/contract.py $(VLLM)

# Each family of targets on a tiny random model, against plain vLLM. Continues a run that was
# interrupted, and writes docs/support.md.
targets: setup
	$(VENV)/bin/python tests/targets/sweep.py
	$(VENV)/bin/python tools/pages.py

# The CUDA build on an emulated GPU, on demand: an environment of its own (9 GB, some 25 minutes),
# then 20 minutes on two cores. `make test` runs a kernel there once the environment exists.
# RELEASE=0.33.0 takes that vLLM. `compare-emulated-gpu` compares some 20,000 tokens, an hour.
RELEASE := 0.32.0
CUDA_VENV := .venv-cuda$(addprefix -,$(filter-out 0.32.0,$(RELEASE)))
EMULATED := $(CUDA_VENV)/bin/python tests/emulated_gpu/run.py
MODES := --lazy --poison --bounds --shuffle
emulated-gpu:
	@$(PYTHON) tools/setup_env.py --venv $(CUDA_VENV) --cuda $(RELEASE)
	@$(MAKE) --no-print-directory -C tests/emulated_gpu PYTHON=$(CURDIR)/$(CUDA_VENV)/bin/python

test-emulated-gpu: emulated-gpu
	for sm in 80 100 120; do $(CUDA_VENV)/bin/python -m pytest $(COMPILED) --sm $$sm || exit 1; done
	$(EMULATED) -m pytest tests/emulated_gpu/checks/check_modules.py
	$(EMULATED) -m pytest tests/emulated_gpu/checks/check_device.py
	$(EMULATED) --lazy --host-forms -m pytest tests/emulated_gpu/checks/check_host_work.py
	$(EMULATED) --lazy --host-forms -m pytest tests/emulated_gpu/checks/check_commands.py
	$(EMULATED) $(MODES) --host-forms -m pytest --numprocesses $(WORKERS) --dist worksteal \
		tests/emulated_gpu/checks/check_engines.py
	$(EMULATED) $(MODES) -m pytest --numprocesses $(WORKERS) --dist worksteal --ignore $(COMPILED) \
		tests/triton_kernels -k "cuda and not loop"

compare-emulated-gpu: emulated-gpu
	CHECK_TOKENS=16 CHECK_RECORD=tests/emulated_gpu/compared.json $(EMULATED) --lazy --poison \
		--host-forms -m pytest -s tests/emulated_gpu/checks/check_engines.py

FIRST := runs/first_drafter
first-drafter: setup
	$(VENV)/bin/python examples/first_drafter/prompts.py $(FIRST)
	$(VENV)/bin/specblock data --target examples/tiny_pair/target --input $(FIRST)/prompts.jsonl \
		--raw --limit 1536 --max-new-tokens 160 --temperature 0 --temperature 0.7 \
		--shard-size 256 --draft-vocab-size 1536 --out $(FIRST)/data \
		--engine '{"kv_cache_memory_bytes": 536870912, "enforce_eager": true}'
	$(VENV)/bin/specblock train examples/first_drafter/train.yaml
	$(VENV)/bin/specblock eval $(FIRST)/drafter --data $(FIRST)/held_out.jsonl --prompts 8 --raw

TWO := runs/two_heads
ANSWER := $(VENV)/bin/specblock data --target examples/tiny_pair/target --raw \
	--max-new-tokens 160 --temperature 0 --temperature 0.7 --shard-size 256 \
	--draft-vocab-size 1536 \
	--engine '{"kv_cache_memory_bytes": 536870912, "enforce_eager": true}'
two-heads: setup
	$(VENV)/bin/python examples/two_heads/prompts.py $(TWO)
	$(ANSWER) --input $(TWO)/code.jsonl --out $(TWO)/data/code
	$(ANSWER) --input $(TWO)/tables.jsonl --out $(TWO)/data/tables
	$(ANSWER) --input $(TWO)/code.jsonl --input $(TWO)/tables.jsonl --out $(TWO)/data/both
	$(VENV)/bin/specblock train examples/two_heads/code.yaml
	$(VENV)/bin/specblock train examples/two_heads/tables.yaml
	$(VENV)/bin/python research/comparison.py examples/two_heads/comparison.yaml

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	@$(MAKE) --no-print-directory types

types: setup
	@mkdir -p build/typed/vllm_specblock
	@ln -sfn ../../../triton_kernels build/typed/vllm_specblock/triton_kernels
	$(VENV)/bin/mypy

setup:
	@$(PYTHON) tools/setup_env.py --venv $(VENV)

clean:
	rm -rf $(VENV) build *.egg-info
