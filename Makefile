# Every target works on a fresh machine: it makes .venv first, once for each change of the pins.
# Remove .venv to change its Python: make test PYTHON=python3.13.
PYTHON ?= python3
WORKERS ?= 2# processes that share the tests; 0: pytest itself

VENV_PYTHON := .venv/bin/python
GPU_FLAGS ?=# of launch.gpu, such as --parts=tests,attention
PIP_INSTALL := $(VENV_PYTHON) -m pip install -q --disable-pip-version-check -c constraints.txt
PINS := setup.py constraints.txt

.PHONY: train test test-all gpu
.DELETE_ON_ERROR:

train: .venv/installed
	$(VENV_PYTHON) -m launch.train --config=configs/mod_isoflop.py --workdir=runs/mod_isoflop

test: .venv/installed-test
	$(VENV_PYTHON) -m pytest -n $(WORKERS)

test-all: .venv/installed-test
	$(VENV_PYTHON) -m pytest -n $(WORKERS) -m ""

# On a machine with a GPU. Its own Python, with JAX for CUDA: make gpu VENV_PYTHON=python3.
ifeq ($(VENV_PYTHON),.venv/bin/python)
gpu: .venv/installed-gpu
endif
gpu:
	$(VENV_PYTHON) -m launch.gpu $(GPU_FLAGS)

# A stamp is touched after its install only, so that one which failed is tried again.
.venv/installed: $(PINS)
	@echo 'Installing JAX, Flax and what else setup.py names into .venv: a minute or two.'
	@$(PYTHON) -m venv .venv
	@$(PIP_INSTALL) -e .
	@touch $@

.venv/installed-test: $(PINS)
	@echo 'Installing JAX, Flax, pytest and what else setup.py names into .venv: a minute or two.'
	@$(PYTHON) -m venv .venv
	@$(PIP_INSTALL) -e '.[test]'
	@touch .venv/installed $@

.venv/installed-gpu: $(PINS)
	@echo 'Installing JAX for CUDA, Flax, pytest and what else setup.py names into .venv: some minutes.'
	@$(PYTHON) -m venv .venv
	@$(PIP_INSTALL) -e '.[test,gpu]'
	@touch .venv/installed .venv/installed-test $@
