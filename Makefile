# Two commands for a newcomer: `make quickstart` and `make test`. Each sets up .venv by itself
# from plain python3 and pip; nothing else is needed.

VENV   ?= .venv
# `make DEVICE=cpu` or `make DEVICE=cuda`. Without it an environment keeps its device, and a new one
# gets `cuda` if the NVIDIA driver can run CUDA 13.
ifneq ($(origin DEVICE),command line)
DRIVER := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2> /dev/null \
	| head -n 1 | cut -d . -f 1)
DEVICE := $(or $(firstword $(patsubst $(VENV)/.installed-%,%,$(wildcard $(VENV)/.installed-*))),\
	$(shell [ "0$(DRIVER)" -ge 580 ] 2> /dev/null && echo cuda || echo cpu))
ifeq ($(DEVICE),cpu)
ifneq ($(DRIVER),)
$(warning NVIDIA driver $(DRIVER), and the CPU build: CUDA 13 needs 580; then DEVICE=cuda installs it)
endif
endif
endif
LOCKS  := infra/locks/$(DEVICE)

PYTHON ?= python3
BIN    := $(VENV)/bin
# Named after the device: on another one the environment is installed again.
STAMP  := $(VENV)/.installed-$(DEVICE)
ARGS   ?=
# Training backends of the project's own environment, and those with one of their own.
BACKENDS     ?= fsdp fsdp2 megatron
ENVIRONMENTS ?= veomni automodel torchtitan
ROLLOUT_ENVIRONMENTS ?= vllm sglang
BACKEND_CONTRACT := rlhf.testing.test_backend rlhf.testing.test_checkpoint_kill
MEMORY_CONTRACT := rlhf.testing.test_memory
ROLLOUT_CONTRACT := rlhf.testing.test_rollout_engine rlhf.testing.test_rollout_requests \
	rlhf.testing.test_rollout_adapters rlhf.testing.test_rollout_workers \
	rlhf.testing.test_rollout_prompts rlhf.testing.test_rollout_experts \
	rlhf.testing.test_rollout_quantization rlhf.testing.test_rollout_compiled
# Tests that give a figure of the fault matrix and lie beside what they test.
CONTROLLER := tests/unit/engines/controller/test_ray_group.py
FIGURES_ELSEWHERE := \
	$(CONTROLLER)::test_fault_row_3_dead_rank_is_named_with_log_and_others_end \
	$(CONTROLLER)::test_fault_row_4_a_stopped_rank_is_noticed_by_its_silence \
	tests/e2e/test_ownership.py::test_fault_row_18_ten_followers_make_one_job_and_one_commit \
	tests/e2e/test_secrets.py
VLLM_PIPELINE := "tests/e2e/test_rollout_placement.py::test_a_pipeline_whose_answers_come_from_another_environment[vllm-disaggregated]"
# Whole pipelines come first as they are collected: behind many small files, a last long one would
# leave a core idle.
SPREAD := --dist loadfile --no-loadscope-reorder
NUM_CORES = $(shell $(BIN)/python -c 'import os; print(len(os.sched_getaffinity(0)))')
# Empty adds what is for a night.
FAULTS       ?= -m "not nightly"
# Two ranks; empty adds four.
ENVIRONMENT_TIER ?= not slow
# Four ranks too; `not slow` is two.
BACKEND_TIER ?=

# The PyTorch project's own index; asked only when the configured index has no CPU build.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
# An environment of another device is made anew.
clear = $(if $(filter-out %-$(DEVICE),$(wildcard $(1)/.installed-*)),--clear)
# Python of an environment, and pip's options.
install = $(1) -m pip install --quiet $(2) \
	$(if $(filter cpu,$(DEVICE)),|| $(1) -m pip install --quiet --extra-index-url $(TORCH_CPU_INDEX) $(2))

.PHONY: quickstart test test-slow test-stacks test-first-minute test-nightly faults faults-long test-vllm test-harness rollout-matrix races contracts contracts-rollout lint format types bench gpu-check gpu-bench gpu-pipeline gpu-pack recipes trainers zoo zoo-engines lock locks-cuda check-locks docs up down clean
.DEFAULT_GOAL := quickstart

$(STAMP): $(LOCKS)/core.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] < (3, 13) else \
	  "python: got %d.%d; need 3.11 or 3.12; set PYTHON=/path/to/python3.11" % sys.version_info[:2])'
	@rm -f $(VENV)/.installed*
	$(PYTHON) -m venv $(call clear,$(VENV)) $(VENV)
	$(call install,$(BIN)/python,--requirement $<)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

quickstart: $(STAMP)  ## the whole pipeline on CPU: data, SFT, RL, merge, evaluation, promotion
	$(BIN)/rlhf run quickstart $(ARGS)

test: $(STAMP)  ## everything but the contracts and the tests marked slow
	$(BIN)/python -m pytest -n auto $(SPREAD) --ignore tests/contracts -m "not slow and not gpu and not stacks and not matrix" $(ARGS)

test-slow: $(STAMP)  ## the tests marked slow: whole pipelines, kills, services
	@# The exclusive ones come one after the other, beside a worker for each core.
	@log=$$(mktemp); status=0; \
	$(BIN)/python -m pytest --ignore tests/contracts \
	  -m "slow and exclusive and not nightly" $(ARGS) > $$log 2>&1 & exclusive=$$!; \
	trap 'kill -INT $$exclusive; wait $$exclusive; cat $$log; rm -f $$log; exit 130' INT TERM; \
	echo "the exclusive ones write to $$log"; \
	$(BIN)/python -m pytest -n $(NUM_CORES) $(SPREAD) --ignore tests/contracts \
	  -m "slow and not gpu and not exclusive" $(ARGS) || status=$$?; \
	wait $$exclusive || status=$$?; cat $$log; rm -f $$log; exit $$status

test-stacks: $(STAMP)  ## whole stacks killed at every phase, further layouts; too long for .ci/run
	$(BIN)/python -m pytest --ignore tests/contracts -m stacks $(ARGS)

faults: $(STAMP)  ## faults on purpose: figures of the fault matrix, a verdict as the last line
	$(BIN)/python -m pytest tests/faults $(FIGURES_ELSEWHERE) --figures $(FAULTS) $(ARGS)

faults-long: $(STAMP)  ## the same with 200 more random kills, 100 cancels and 200 races; hours
	NUM_CANCELS=100 RACE_ROUNDS=200 $(MAKE) faults FAULTS=

test-first-minute: $(STAMP)  ## forty ends of a home's first minute, each followed by the same command
	NUM_BUSY_LOOPS=3 $(BIN)/python -m pytest tests/faults/test_first_minute.py $(ARGS)

test-nightly: $(STAMP)  ## what a night has time for: 200 random kills
	$(BIN)/python -m pytest --ignore tests/contracts -m nightly $(ARGS)

test-vllm: $(STAMP)  ## a short pipeline whose answers come from vLLM in a pool of its own
	$(MAKE) env-vllm
	$(BIN)/python -m pytest $(VLLM_PIPELINE) $(ARGS)

test-harness: $(STAMP)  ## tasks of lm-evaluation-harness beside the harness's own model
	$(MAKE) env-lm-eval
	$(BIN)/python -m pytest tests/e2e/test_harness.py $(ARGS)

rollout-matrix: $(STAMP)  ## the quickstart on vLLM and SGLang, beside the ranks and in a pool of their own
	set -e; for name in $(ROLLOUT_ENVIRONMENTS) torchtitan; do $(MAKE) env-$$name; done
	$(BIN)/python -m pytest -s --ignore tests/contracts -m matrix $(ARGS)

races: $(STAMP)  ## two hundred rounds of ten followers that want one stage at once
	RACE_ROUNDS=200 $(BIN)/python -m pytest tests/e2e/test_ownership.py $(ARGS)

contracts: $(STAMP)  ## every training backend and the other plugins against their contracts
	set -e; for backend in $(BACKENDS); do \
	  $(BIN)/python -m pytest -n 2 $(SPREAD) --pyargs $(BACKEND_CONTRACT) --backend $$backend \
	    -m "$(BACKEND_TIER)" $(ARGS); done
	$(BIN)/python -m pytest -n 2 $(SPREAD) --pyargs rlhf.testing \
	  --ignore tests/contracts/test_backend.py --ignore tests/contracts/test_checkpoint_kill.py \
	  --ignore tests/contracts/test_memory.py $(ARGS)
	set -e; for name in $(ENVIRONMENTS); do \
	  $(MAKE) env-$$name; \
	  .envs/$$name/bin/python -m pytest --pyargs $(BACKEND_CONTRACT) $(MEMORY_CONTRACT) \
	    --backend $$name -m "$(ENVIRONMENT_TIER)" $(ARGS); done

contracts-rollout: $(STAMP)  ## every rollout engine against its contract, in its own environment
	$(BIN)/python -m pytest --pyargs $(ROLLOUT_CONTRACT) --engine transformers $(ARGS)
	set -e; for name in $(ROLLOUT_ENVIRONMENTS); do \
	  $(MAKE) env-$$name; \
	  OMP_NUM_THREADS=1 .envs/$$name/bin/python -m pytest --pyargs $(ROLLOUT_CONTRACT) \
	    --engine $$name $(ARGS); done

# Job environments, of libraries that clash with the project's own or that few need: `make env-veomni`,
# `make env-lm-eval`, ...
env-%: .envs/%/.installed-$(DEVICE) ;

.envs/%/.installed-$(DEVICE): $(LOCKS)/%.lock pyproject.toml
	@rm -f .envs/$*/.installed*
	$(PYTHON) -m venv $(call clear,.envs/$*) .envs/$*
	$(call install,.envs/$*/bin/python,--no-deps --requirement $<)
	.envs/$*/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

.PRECIOUS: .envs/%/.installed-$(DEVICE)

infra/locks/%.lock:
	@echo "DEVICE: got $(DEVICE), for which there is no $@; need one of:" \
	  $(notdir $(patsubst %/core.lock,%,$(wildcard infra/locks/*/core.lock))) >&2; exit 2

lint: $(STAMP)  ## style, import contracts, docstrings, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/codespell README.md docs infra tasks flows engines hardware tests

types: $(STAMP)  ## static types
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## ours and the peer in one run, as ratios
	$(BIN)/python tests/benchmarks/run.py $(ARGS)

gpu-check: $(STAMP)  ## tests of one GPU and a consistency run, at most 4 minutes; the CPU twins without one
	$(BIN)/python tests/gpu/gpu_check.py $(ARGS)

gpu-bench: $(STAMP)  ## what one GPU reaches against its goals, at most 4 minutes; tiny sizes without one
	$(BIN)/python tests/benchmarks/gpu_bench.py $(ARGS)

gpu-pipeline: $(STAMP)  ## whole pipelines on one GPU, at most 8 minutes; a tiny one without a GPU
	$(BIN)/python tests/gpu/gpu_pipeline.py $(ARGS)

gpu-pack: $(STAMP)  ## what a GPU machine without a network lacks, in parts of 60 MB, each with its script
	$(BIN)/python tests/gpu/pack/gpu_pack.py $(ARGS)

recipes: $(STAMP)  ## every CPU recipe with three seeds against its start; hours, goes on where it stopped
	$(BIN)/python tests/benchmarks/recipes.py $(ARGS)

trainers: $(STAMP)  ## preferences and distillation with three seeds against their start; likewise
	$(BIN)/python tests/benchmarks/trainers.py $(ARGS)

zoo: $(STAMP)  ## every family of causal LMs that transformers can build: docs/reference/models.md
	$(BIN)/python tests/zoo/model_zoo.py $(ARGS)

zoo-engines: $(STAMP)  ## the families that recipes name on vLLM and SGLang: docs/reference/served_models.md
	set -e; for name in $(ROLLOUT_ENVIRONMENTS); do $(MAKE) env-$$name; done
	$(BIN)/python tests/zoo/served_zoo.py $(ARGS)

locks-cuda: $(STAMP)  ## resolve the locks for NVIDIA GPUs anew, on any machine
	$(BIN)/python tests/locks/relock.py $(ARGS)

check-locks: $(STAMP)  ## the locks for NVIDIA GPUs against the package index; 2 minutes each
	$(BIN)/python tests/locks/relock.py --check $(ARGS)

lock:  ## resolve pyproject.toml anew and rewrite the CPU lock
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet "torch==2.13.0+cpu" setuptools ".[dev,megatron]" || \
	  .venv-lock/bin/python -m pip install --quiet --extra-index-url $(TORCH_CPU_INDEX) \
	    "torch==2.13.0+cpu" setuptools ".[dev,megatron]"
	{ head -3 infra/locks/cpu/core.lock; .venv-lock/bin/python -m pip freeze --all \
	  | grep -vE '^(rlhf-pipeline|pip)\b' | sort -f; } > .venv-lock/core.lock
	mv .venv-lock/core.lock infra/locks/cpu/core.lock
	rm -rf .venv-lock build

docs: $(STAMP)  ## the reference pages that are generated from the code
	$(BIN)/python docs/generate.py

up: $(STAMP)  ## Prefect server and worker, Ray head and MLflow on loopback
	$(BIN)/rlhf up

down: $(STAMP)
	$(BIN)/rlhf down

clean:
	rm -rf $(VENV) build ./*.egg-info
