# Every target works on a fresh machine. It first creates .venv, and again after changes of the pins.
# To use another Python, remove .venv and run: make test PYTHON=python3.13
PYTHON ?= python3
WORKERS ?= 2# test processes; 0: run the tests in pytest itself
# worksteal gives each process a contiguous half, so that fixtures of a file are made once.
IN_PARALLEL = -n $(WORKERS) --dist worksteal

VENV_PYTHON := .venv/bin/python
GPU_FLAGS ?=# of launch.gpu, such as --deadline=540
# Without --no-compile pip would spend a minute on bytecode, most of which is never imported.
# The bytecode of what is imported is kept: without it a command takes four seconds to start, not two.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := pip install -q --disable-pip-version-check --no-compile
PIP_INSTALL := $(VENV_PYTHON) -m $(INSTALL) -c constraints.txt
PINS := setup.py constraints.txt

# The second environment: JAX 0.11.2 with the first working Python 3.12 or 3.13 in PATH or pyenv.
PYENV_ROOT ?= $(HOME)/.pyenv
NEXT_PYTHONS := python3.12 python3.13 $(wildcard $(foreach minor,12 13,$(PYENV_ROOT)/versions/3.$(minor).*/bin/python))
NEXT_PYTHON ?= $(firstword $(foreach python,$(NEXT_PYTHONS),$(shell $(python) -c 'import sys; \
    sys.version_info >= (3, 12) and print("$(python)")' 2>/dev/null)))
NEXT := .venv-next/bin/python
NEXT_TESTS := tests/kernels tests/model tests/inference tests/launch/backends_test.py \
    $(addprefix tests/training/,losses_test.py train_step_test.py mesh_test.py gpu_collectives_test.py)

TORCH_PINS := tests/conversion/constraints-torch.txt

.PHONY: train test test-next test-torch has-next test-all faults mutations dry-runs gpu gpu-rehearsal study study-budgets study-routing study-capacity study-every-block study-gates study-moda study-streams study-streams-fast study-sources study-recursions study-text study-experts study-gpu study-moda-gpu docs-notebooks docs-api
.DELETE_ON_ERROR:

# Huge pages make a step on Linux 6% faster (docs/profiling.md, section 2).
train: export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
train: .venv/installed
	$(VENV_PYTHON) -m launch.train --config=configs/mod_isoflop.py --workdir=runs/mod_isoflop

test: .venv/installed-test
	$(VENV_PYTHON) -m pytest $(IN_PARALLEL)

# Tests on JAX 0.11.2 of the kernels (lowered, interpreted, and compiled for an H200 description),
# and of the models, training and inference that use them.
test-next: .venv-next/installed
	JAX_PLATFORMS=cpu $(NEXT) -m pytest $(IN_PARALLEL) -m "not slow and not faults" $(NEXT_TESTS)

# Fails with a message if test-next cannot run.
has-next:
	@test -n "$(NEXT_PYTHON)" || { echo 'make test-next needs Python 3.12 or 3.13, and found neither on PATH nor in $(PYENV_ROOT)'; exit 1; }

# Exported models in PyTorch and transformers, which no other target installs: same logits, tokens
# and losses.
test-torch: .venv-torch/installed
	JAX_PLATFORMS=cpu .venv-torch/bin/python -m pytest $(IN_PARALLEL) -m "" -k pytorch tests/conversion/torch_folder_test.py \
        tests/benchmarks/pytorch_test.py

# All tests. In parts: make test-all TESTS=tests/model, then TESTS=tests/training, ...
TESTS ?= tests
test-all: .venv/installed-test
	$(VENV_PYTHON) -m pytest $(IN_PARALLEL) -m "" $(TESTS)

# Kills, stops and damages runs, fills the disk, and resumes: 15 minutes.
faults: .venv/installed-test
	$(VENV_PYTHON) -m pytest $(IN_PARALLEL) tests/faults -m "faults or not faults"

# Plants each mistake of tests/mutations.toml in the code; a test must fail for each.
mutations: .venv/installed-test
	$(VENV_PYTHON) -m tests.mutations

# Recompiles the train steps of docs/scale.md for up to 256 devices, and prints the table.
dry-runs: .venv/installed
	$(VENV_PYTHON) -m launch.dry_run again results/cpu/dry_run/*.json
	$(VENV_PYTHON) -m launch.dry_run table results/cpu/dry_run/*.json

# Studies at equal FLOPs or steps. Each is one command that can be resumed. docs/isoflop.md says
# what each study can decide and how long it takes.
PROCESSES ?= 2# runs at a time
RESULTS ?=# optional folder, such as results/cpu, for a copy of the results
ISOFLOP = $(VENV_PYTHON) -m launch.isoflop
# The command of the study of a target, or of its part $(1), such as /2e12.
isoflop = $(ISOFLOP) --workdir=runs/$@$(1) --processes=$(PROCESSES) \
    $(if $(RESULTS),--results=$(RESULTS)/$@$(1))
# Seeds of the studies, as planned in claims.toml.
SEVEN := 0,1,2,3,4,5,6
EIGHT := $(SEVEN),7
NINE := $(EIGHT),8
TEN := $(NINE),9
TWELVE := $(TEN),10,11
SIXTEEN := $(TWELVE),12,13,14,15
FRESH := 12,13,14,15,16,17,18,19,20,21,22,23

study: .venv/installed
	$(call isoflop) --config=configs/study.py --budgets=6e11,2e12 --sizes=2x64,4x64,8x64 \
	    --seeds=$(EIGHT) --learning_rates=0.003,0.006,0.012 \
	    --variants=dense,shallow,mod,mod_0.5,every_0.125,every_0.5,random,random_every_0.5
	$(VENV_PYTHON) -m launch.claims --workdir=runs/study

AT_BUDGET := --config=configs/study.py --learning_rates=0.006
AT_OPTIMUM := $(AT_BUDGET) --variants=dense,shallow,mod
study-budgets: .venv/installed
	$(call isoflop,/6e11) $(AT_OPTIMUM) --budgets=6e11 --sizes=1x64,2x64,4x64,6x64 --seeds=$(NINE)
	$(call isoflop,/2e12) $(AT_OPTIMUM) --budgets=2e12 --sizes=1x64,2x64,4x64,6x64,8x64 --seeds=$(NINE)
	$(call isoflop,/6e12) $(AT_OPTIMUM) --budgets=6e12 --sizes=2x64,4x64,6x64,8x64,10x64 --seeds=$(NINE)
	$(call isoflop,/2e13) $(AT_OPTIMUM) --budgets=2e13 --sizes=4x64,6x64,8x64,10x64,12x64,16x64 --seeds=$(SEVEN)

ROUTERS := $(AT_BUDGET) --variants=mod,random,position,norm
study-routing: .venv/installed
	$(call isoflop,/4x64-2e12) $(ROUTERS) --budgets=2e12 --sizes=4x64 --seeds=$(SIXTEEN)
	$(call isoflop,/4x128-2e12) $(ROUTERS) --budgets=2e12 --sizes=4x128 --seeds=$(SIXTEEN)
	$(call isoflop,/4x64-1e13) $(ROUTERS) --budgets=1e13 --sizes=4x64 --seeds=$(EIGHT)
	$(call isoflop,/4x128-1e13) $(ROUTERS) --budgets=1e13 --sizes=4x128 --seeds=$(EIGHT)

EVERY_OTHER := mod_0.95,mod_0.75,mod_0.5,mod_0.25,mod,mod_0.0625
EVERY := every_0.75,every_0.5,every_0.25,every_0.125
study-capacity: .venv/installed
	$(call isoflop) $(AT_BUDGET) --budgets=2e12 --sizes=4x64 --seeds=$(TWELVE) \
	    --variants=dense,$(EVERY_OTHER),$(EVERY),random_every_0.5

study-every-block: .venv/installed
	$(call isoflop) $(AT_BUDGET) --budgets=2e12 --sizes=4x64 --seeds=$(FRESH) \
	    --variants=mod,mod_0.5,mod_0.25,every_0.5,every_0.25,every_0.125,random_every_0.5,dense

study-gates: .venv/installed
	$(call isoflop) $(AT_BUDGET) --budgets=2e12 --sizes=4x64 --seeds=$(TWELVE) \
	    --variants=mod,aux_loss,threshold,sigmoid,tanh,straight_through

MODA := moda_attention,moda,moda_blocks,moda_unrotated,moda_projection
PLACED := dense_post,wider_post,moda_attention_post,moda_post,dense_reordered,moda_reordered
AT_STEPS := --config=configs/moda.py --steps=600 --config.evaluation.every=0 \
    --config.evaluation.final_batches=256
BY_DEPTH := $(AT_STEPS) --variants=dense,wider,$(MODA),depth_attention,dense_average,average,mod,mod_moda,mod_moda_masked,$(PLACED)
DEEP := dense,wider,wider_mhc,moda_attention,moda,average,attnres,hyper,mhc,mudd,value_residual,value_attention,value_embeddings,dense_post,wider_post,moda_attention_post,moda_post
study-moda: .venv/installed
	$(call isoflop,/8x64) $(BY_DEPTH) --sizes=8x64 --seeds=$(EIGHT)
	$(call isoflop,/24x64) $(AT_STEPS) --variants=$(DEEP) --sizes=24x64 --seeds=$(EIGHT)

# Fresh seeds, because three pairs of attnres and dense were known when its claims were written.
AT_8X64 := $(AT_STEPS) --sizes=8x64 --seeds=$(FRESH)
RIVALS := wider,wider_mhc,value_residual,moda,average,hyper,mhc,mudd,value_attention,value_embeddings,embedding_residual
study-streams: .venv/installed
	$(call isoflop) $(AT_8X64) --learning_rates=0.003 \
	    --variants=dense,attnres,attnres_block,$(RIVALS)

study-streams-fast: .venv/installed
	$(call isoflop) $(AT_8X64) --learning_rates=0.006 \
	    --variants=dense,attnres,attnres_block,hyper,mudd

# Repeats runs of study-streams to measure what each sublayer reads.
study-sources: .venv/installed
	$(call isoflop) $(AT_STEPS) --sizes=8x64 --learning_rates=0.003 --seeds=12,13,14,15 \
	    --variants=attnres,attnres_block

# Eight blocks run in all variants except once_2 and once_3.
study-recursions: .venv/installed
	$(call isoflop) $(AT_BUDGET) --budgets=2e12 --sizes=8x64 --seeds=$(EIGHT) \
	    --variants=dense,once_2,once_3,looped_2,looped_3,recursions_2,recursions_3,recursions_3_first,mod,token_choice_3

# Text of packages that every installation has, with a tokenizer of 4,096 ids.
TEXT := runs/study-text/text
ON_TEXT := --config.data.source=$(TEXT) --config.data.tokenizer=prepared --config.model.vocab_size=4096
study-text: .venv/installed
	site=$$($(VENV_PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	    $(VENV_PYTHON) -m launch.prepare --output=$(TEXT) --tokenizer=bpe:4096 \
	    --input="$$site/jax/**/*.py,$$site/flax/**/*.py,$$site/optax/**/*.py,$$site/orbax/**/*.py,$$site/numpy/**/*.py,$$site/scipy/**/*.py,$$site/matplotlib/**/*.py"
	$(call isoflop,/4x64) $(AT_BUDGET) $(ON_TEXT) --budgets=2e12 --sizes=4x64 --seeds=$(EIGHT) \
	    --variants=dense,shallow,mod,random,aux_loss
	$(call isoflop,/8x64) $(AT_STEPS) $(ON_TEXT) --sizes=8x64 --seeds=$(EIGHT) \
	    --variants=dense,wider,moda,dense_post,moda_post

study-experts: .venv/installed
	$(call isoflop) --config=configs/moe.py --budgets=6.4e12 --sizes=4x128 --seeds=$(TEN) \
	    --variants=dense,moe,moe_capacity_0.5,integrated,staged --config.data.batch_size=8

# For a machine with a GPU. To use a Python that has JAX for CUDA: make gpu VENV_PYTHON=python3
ifeq ($(VENV_PYTHON),.venv/bin/python)
gpu study-gpu study-moda-gpu: .venv/installed-gpu
endif
gpu:
	$(VENV_PYTHON) -m launch.gpu $(GPU_FLAGS)

# On one GPU, in any number of short sessions: stop with Ctrl-C or SIGTERM, then run it again.
AT_SCALE := mod,mod_0.25,mod_0.5,every_0.125,every_0.5,aux_loss,random,random_every_0.5,position,norm
study-gpu:
	$(ISOFLOP) --config=configs/mod_isoflop_gpu.py --workdir=runs/study-gpu --budgets=1e15,1e16 \
	    --sizes=4x256,6x256,8x256,10x256,12x256 --seeds=$(EIGHT) \
	    --learning_rates=0.0015,0.003,0.006 --variants=dense,shallow,$(AT_SCALE)

study-moda-gpu:
	$(ISOFLOP) --config=configs/moda_24l.py --workdir=runs/study-moda-gpu --steps=2000 \
	    --sizes=24x384 --seeds=$(EIGHT) --config.model.norm_placement=pre \
	    --config.data.source=python_environment --config.evaluation.every=0 \
	    --variants=dense,wider,average,moda_attention,moda,mod,mod_moda,dense_post,wider_post,moda_post

# Rehearses on a CPU a visit to a GPU machine without a network. Takes three to ten minutes on two cores.
gpu-rehearsal: .venv-next/installed
	JAX_PLATFORMS=cpu $(NEXT) -m tests.gpu_rehearsal --folder=build/gpu-rehearsal

# API pages in build/api/index.html. Warnings are ignored for optax types that pdoc cannot name.
# Two modules are left out because they need jax-triton and PyTorch.
docs-api: .venv/installed-docs
	JAX_PLATFORMS=cpu $(VENV_PYTHON) -W ignore -m pdoc -d google -o build/api moddepth_jax kernels_pallas configs '!moddepth_jax.benchmarks.triton_baseline' \
	    '!moddepth_jax.benchmarks.pytorch_steps'

# Renders docs/notebooks from the run of `make train` and from two runs that are trained here.
RENDERED := build/notebooks
PALETTE := import sys; from PIL import Image; \
    [Image.open(p).convert("RGB").quantize(128, dither=0).save(p, optimize=True) for p in sys.argv[1:]]
render = $(VENV_PYTHON) -m jupytext --quiet --to ipynb --execute --output $(RENDERED)/$(1).ipynb \
    notebooks/$(1).py && rm -rf docs/notebooks/$(1)_files && \
    $(VENV_PYTHON) -m nbconvert --log-level=WARN --to markdown --output-dir docs/notebooks \
    $(RENDERED)/$(1).ipynb && $(VENV_PYTHON) -c '$(PALETTE)' docs/notebooks/$(1)_files/*.png

docs-notebooks: .venv/installed-notebooks runs/mod_isoflop/summary.json runs/moda/summary.json \
    runs/moda_dense/summary.json
	@mkdir -p $(RENDERED)
	NOTEBOOK_WORKDIR=$(CURDIR)/runs/mod_isoflop $(call render,routing_heatmaps)
	NOTEBOOK_WORKDIR=$(CURDIR)/runs/moda NOTEBOOK_BESIDE=$(CURDIR)/runs/moda_dense \
	    $(call render,depth_attention)
	$(call render,isoflop)

runs/mod_isoflop/summary.json: | .venv/installed
	$(VENV_PYTHON) -m launch.train --config=configs/mod_isoflop.py --workdir=$(@D)

runs/moda/summary.json: | .venv/installed
	$(VENV_PYTHON) -m launch.train --config=configs/moda.py --workdir=$(@D)

runs/moda_dense/summary.json: | .venv/installed
	$(VENV_PYTHON) -m launch.train --config=configs/moda.py:slots=none --workdir=$(@D)

# A stamp is touched only after a successful installation, so that a failed one is repeated.
.venv/installed: $(PINS)
	@echo 'Installing JAX, Flax and the other packages of setup.py into .venv: a minute or two.'
	@$(PYTHON) -m venv .venv
	@$(PIP_INSTALL) -e .
	@touch $@

.venv/installed-test: $(PINS)
	@echo 'Installing JAX, Flax, pytest and the other packages of setup.py into .venv: a minute or two.'
	@$(PYTHON) -m venv .venv
	@$(PIP_INSTALL) -e '.[test]'
	@touch .venv/installed $@

.venv-next/installed: $(PINS) constraints-next.txt
	@$(MAKE) -s has-next
	@echo 'Installing JAX 0.11.2 and the compilers for GPUs into .venv-next: some minutes.'
	@$(NEXT_PYTHON) -m venv .venv-next
	@{ grep -v '^jax' constraints.txt; cat constraints-next.txt; } > .venv-next/constraints.txt
	@$(NEXT) -m $(INSTALL) -c .venv-next/constraints.txt -e '.[test,compile]'
	@touch $@

.venv-torch/installed: $(PINS) $(TORCH_PINS)
	@echo 'Installing JAX, Flax, PyTorch and transformers into .venv-torch: some minutes.'
	@$(PYTHON) -m venv .venv-torch
	@.venv-torch/bin/python -m $(INSTALL) -c constraints.txt -c $(TORCH_PINS) -e '.[test]' torch transformers
	@touch $@

.venv/installed-notebooks: $(PINS)
	@echo 'Installing JAX, Flax, Jupyter and the other packages of setup.py into .venv: some minutes.'
	@$(PYTHON) -m venv .venv
	@$(PIP_INSTALL) -e '.[notebooks]'
	@touch .venv/installed $@

.venv/installed-docs: .venv/installed-test
	@$(PIP_INSTALL) -e '.[docs]'
	@touch $@

.venv/installed-gpu: $(PINS)
	@echo 'Installing JAX for CUDA, Flax, pytest and the other packages of setup.py into .venv: some minutes.'
	@$(PYTHON) -m venv .venv
	@$(PIP_INSTALL) -e '.[test,gpu]'
	@touch .venv/installed .venv/installed-test $@
