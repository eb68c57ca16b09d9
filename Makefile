# prejit: the Makefile is the interface. `make demo` and `make test` need only python3 (3.11 or newer) and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Stamps: an environment is made again when what it is made from changes.
READY := $(VENV)/.ready
# A second interpreter, where there is one, for the jax versions that the first cannot have.
OTHER := $(shell for v in 3.13 3.12; do p=$$(command -v python$$v) && "$$p" -c '' 2>/dev/null && echo $$p && break; \
	p=$$(ls -d $$HOME/.pyenv/versions/$$v.*/bin/python 2>/dev/null | head -n 1); [ -n "$$p" ] && echo $$p && break; done)
OTHER_VENV := .venv-other
OTHER_READY := $(OTHER_VENV)/.ready
DOCS_VENV := .venv-docs
DOCS_READY := $(DOCS_VENV)/.ready
PROMPT := def read_lines(path):
# Environments of pinned targets that the tests make (some 3 GB), kept for the next run.
export PREJIT_TEST_ENVIRONMENTS ?= $(CURDIR)/.environments

.PHONY: help demo artifacts test test-main test-fast test-other lint format bench bench-full forms gpu parity demo-model hostile docs clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:[^#]*## /\t/' | expand -t 14

demo: $(READY) ## build the demo bundle, then generate from it in a new process
	@$(BIN)/prejit build manifests/demo.toml -o artifacts --skip-unbuildable
	@printf '%s' '$(PROMPT)'
	@$(BIN)/python -m prejit.runtime generate artifacts/demo --prompt '$(PROMPT)' --max-new-tokens 80 \
		--temperature 0.6 --top-p 0.9 --seed 1 --require-aot --stats

artifacts: $(READY) ## build every manifest that this machine can build
	@cd benchmarks && $(abspath $(BIN))/python encoder_model.py ../manifests/minilm-random
	@$(BIN)/prejit build manifests/*.toml -o artifacts --skip-unbuildable

test: $(READY) ## all tests, those of the second interpreter side by side with them
	@$(MAKE) --no-print-directory -j2 test-main test-other

test-main: $(READY) ## all tests on one interpreter
	$(BIN)/python -m pytest

test-fast: $(READY) ## the unit tests
	$(BIN)/python -m pytest tests/unit

test-other: ## the unit tests on a newer interpreter and jax, where one is present
ifneq ($(OTHER),)
	@$(MAKE) --no-print-directory $(OTHER_READY)
	$(OTHER_VENV)/bin/python -m pytest tests/unit tests/parity tests/format -q
else
	@echo 'no python3.12 or python3.13 here: the tests run on $(PYTHON) alone'
endif

lint: $(READY) ## formatter, linter, type checker
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY) ## format, and fix what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY) ## beside JAX and llama.cpp, in under 5 minutes (the first time it makes their environments)
	$(BIN)/python benchmarks/run.py --quick

bench-full: $(READY) ## beside every peer: OpenVINO, ONNX Runtime, CTranslate2, IREE as well; encoder, 1B, start-up
	$(BIN)/python benchmarks/run.py

forms: $(READY) ## measure the forms of products that ship as recorded (a quiet machine, 15 minutes)
	$(BIN)/python benchmarks/forms.py

gpu: ## the check on a real NVIDIA GPU (installs jax with CUDA)
	PYTHON=$(PYTHON) benchmarks/gpu.sh

parity: $(READY) ## models against transformers' torch models (installs torch)
	$(BIN)/python -m pip install --quiet torch
	$(BIN)/python -m pytest tests/parity -m "torch or not torch"

hostile: $(READY) ## 500 random configurations, tokenizers, manifests and calls (10 minutes); writes its figures
	PREJIT_HOSTILE_EXAMPLES=125 $(BIN)/python -m pytest tests/campaigns

docs: $(READY) $(DOCS_READY) ## build the documentation site into site/ and check its links
	$(BIN)/python docs/generate.py .site-source
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict
	$(BIN)/python docs/check_site.py site

demo-model: $(READY) ## train the demo model again
	$(BIN)/python -m pip install --quiet --group demo-model
	$(BIN)/python manifests/demo-model/train.py

clean: ## remove environments, bundles and caches of this checkout
	rm -rf .venv .venv-other .venv-gpu .venv-docs site .site-source .environments artifacts/*/ .pytest_cache .mypy_cache .ruff_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

define environment
	@echo 'setting up $(1) (a few minutes the first time)'
	@$(2) -m venv $(1)
	@$(1)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(1)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[compiler]' --group test --group lint
	@touch $(1)/.ready
endef

$(READY): pyproject.toml
	$(call environment,$(VENV),$(PYTHON))

$(OTHER_READY): pyproject.toml
	$(call environment,$(OTHER_VENV),$(OTHER))

$(DOCS_READY): pyproject.toml
	@echo 'setting up $(DOCS_VENV) (a minute the first time)'
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --group docs
	@touch $@
