# prejit: the Makefile is the interface. `make demo` and `make test` need only python3 (3.11 or newer) and make.

# The first of these versions that is here and can make an environment: on the PATH, or of pyenv.
find_python = $(shell for v in $(1); do for p in "$$(command -v python$$v)" $$HOME/.pyenv/versions/$$v.*/bin/python; do \
	"$$p" -c 'import ensurepip' 2>/dev/null && echo "$$p" && exit; done; done)
# The newest interpreter runs everything, with the newest jax.
ifndef PYTHON
PYTHON := $(or $(call find_python,3.13 3.12),python3)
endif
VENV := .venv
BIN := $(VENV)/bin
# Stamps: an environment is made again when what it is made from changes.
READY := $(VENV)/.ready
# The oldest other one, with the oldest jax that it can have, runs what can differ there.
OTHER := $(call find_python,$(filter-out $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'),3.11 3.12 3.13))
OTHER_VENV := .venv-other
OTHER_READY := $(OTHER_VENV)/.ready
# The three wheels, and what an environment with all of them is made from.
HOUSES := --editable './runtime[otel,trust,keyless,store]' --editable ./server --editable ./compiler
SETTINGS := pyproject.toml runtime/pyproject.toml server/pyproject.toml compiler/pyproject.toml
# Tools that verify what prejit signs; they have dependencies that the other packages cannot share.
TOOLS_VENV := .venv-tools
TOOLS_READY := $(TOOLS_VENV)/.ready
DOCS_VENV := .venv-docs
DOCS_READY := $(DOCS_VENV)/.ready
PROMPT := def read_lines(path):
# Environments of pinned targets that the tests make (some 3 GB), kept for the next run.
export PREJIT_TEST_ENVIRONMENTS ?= $(CURDIR)/.environments
# Each of the hundreds of processes that the tests start would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

# One process of tests for each CPU, or as many as both.sh says; each takes whole files, whose fixtures are theirs.
WORKERS ?= logical
# A campaign runs for longer than a test may. Its own time limit is in its module.
CAMPAIGN := -o faulthandler_timeout=0
hostile damage chaos broken-transfers soak swaps load-check releases drills hostile-clients differential: export PREJIT_TEST_ALL := 1
AT_ONCE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
TESTS ?= tests
# What the oldest interpreter runs.
CHOSEN := -p tests.other_interpreter

.PHONY: help demo artifacts dist test test-all test-main test-fast test-other test-other-all coverage lint check hooks format bench bench-full forms gpu parity parity-table test-ray test-platforms demo-model hostile damage fuzz chaos broken-transfers evaluation soak swaps drills releases load-check hostile-clients differential untraced-programs untraced-mutations docs clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:[^#]*## /\t/' | expand -t 14

demo: $(READY) ## build the demo bundle, then generate from it in a new process
	@$(BIN)/prejit build manifests/demo.toml -o artifacts --skip-unbuildable
	@printf '%s' '$(PROMPT)'
	@$(BIN)/python -m prejit.runtime generate artifacts/demo --prompt '$(PROMPT)' --max-new-tokens 80 \
		--temperature 0.6 --top-p 0.9 --seed 1 --on-mismatch error --stats

artifacts: $(READY) ## build every manifest that this machine can build
	@$(BIN)/python -m benchmarks.harness.encoder_model manifests/minilm-random
	@$(BIN)/prejit build manifests/*.toml -o artifacts --skip-unbuildable

test: $(READY) $(TOOLS_READY) ## the tests on the newest interpreter, and on the oldest one what can differ there
	@tests/both.sh $(MAKE)

test-all: $(READY) $(TOOLS_READY) ## before a release: all cases of all tests, on both interpreters
	PREJIT_TEST_ALL=1 $(BIN)/python -m pytest $(AT_ONCE)
	@PREJIT_TEST_ALL=1 $(MAKE) --no-print-directory test-other-all

test-main: $(READY) $(TOOLS_READY) ## the tests on the newest interpreter
	$(BIN)/python -m pytest $(AT_ONCE)

test-fast: $(READY) ## the unit tests
	$(BIN)/python -m pytest $(AT_ONCE) tests/unit

test-other-all: CHOSEN := tests/unit tests/parity tests/format
test-other test-other-all: ## on the oldest interpreter and jax, where one is present, what can differ there, or all
ifneq ($(OTHER),)
	@$(MAKE) --no-print-directory $(OTHER_READY)
	$(OTHER_VENV)/bin/python -m pytest $(AT_ONCE) $(CHOSEN) -q
else
	@echo 'no other interpreter from 3.11 to 3.13 here: the tests run on $(PYTHON) alone'
endif

coverage: $(READY) ## lines and branches that tests run, processes that they start included
	$(BIN)/coverage erase
	-$(BIN)/coverage run -m pytest $(AT_ONCE) $(TESTS)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report --skip-covered --skip-empty --sort=miss

lint: $(READY) ## formatter, linter, type checker, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

check: $(READY) ## lint, and the unit tests that touch what changed, in under a minute
	@$(MAKE) --no-print-directory lint
	$(BIN)/python -m scripts.changed_tests

hooks: ## have git lint before a commit, and run `make check` before a push
	git config core.hooksPath scripts/hooks

format: $(READY) ## format, and fix what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY) ## beside JAX and llama.cpp, in about 5 minutes (the first time 20 more: llama.cpp is compiled)
	$(BIN)/python -m benchmarks.sections --quick

bench-full: $(READY) ## beside every peer: OpenVINO, ONNX Runtime, CTranslate2 as well; encoder, 1B, start-up
	$(BIN)/python -m benchmarks.sections

forms: $(READY) ## measure the forms of products that ship as recorded (a quiet machine, 15 minutes)
	$(BIN)/python -m benchmarks.studies.forms

gpu: ## the check on a real NVIDIA GPU (installs jax with CUDA)
	PYTHON=$(PYTHON) benchmarks/studies/gpu.sh

parity: $(READY) ## models against transformers' torch models (installs torch)
	$(BIN)/python -m pip install --quiet torch
	PREJIT_TEST_ALL=1 $(BIN)/python -m pytest tests/parity -m "torch or not torch"

parity-table: $(READY) ## the table of docs/reference/models.md (installs torch, 1 GB; an hour)
	test -d $(PREJIT_TEST_ENVIRONMENTS)/torch || $(PYTHON) -m venv $(PREJIT_TEST_ENVIRONMENTS)/torch
	$(PREJIT_TEST_ENVIRONMENTS)/torch/bin/python -m pip install --quiet torch==2.13.0 transformers==5.24.0 safetensors
	$(BIN)/python -m tests.parity.model_table $(PREJIT_TEST_ENVIRONMENTS)/torch/bin/python $(PREJIT_TEST_ENVIRONMENTS)/torch/models --build
	$(BIN)/python docs/generate.py

test-ray: $(READY) ## the tests on a Ray cluster of this machine (installs Ray, 260 MB)
	$(BIN)/python -m pip install --quiet 'ray[client]>=2.40'
	PREJIT_TEST_ALL=1 $(BIN)/python -m pytest -n0 tests/integration/test_cluster.py

# MLServer wants versions that the others do not take, and it and Triton of PyPI have nothing for Python 3.13. Triton
# asks for NumPy 1 and works with the one that jax needs.
PLATFORMS = $(PREJIT_TEST_ENVIRONMENTS)/platforms
MLSERVER = $(PREJIT_TEST_ENVIRONMENTS)/mlserver
ON_PLATFORMS := PREJIT_TEST_ALL=1 PREJIT_PLATFORM_FIGURES=1 PREJIT_PLATFORM_CALLS=30
IN_SERVERS := tests/integration/test_platform_servers.py

test-platforms: $(READY) ## Ray Serve, Triton, BentoML, MLServer, LangChain, LlamaIndex (installs them, 3 GB; 15 minutes); writes figures
	test -d $(PLATFORMS) || $(BIN)/uv venv --quiet --python "$(call find_python,3.12 3.11)" $(PLATFORMS)
	test -d $(MLSERVER) || $(BIN)/uv venv --quiet --python "$(call find_python,3.12 3.11)" $(MLSERVER)
	echo 'numpy>=2' > $(PLATFORMS)/overrides.txt
	$(BIN)/uv pip install --quiet --python $(PLATFORMS) --override $(PLATFORMS)/overrides.txt nvidia-pytriton \
		--editable './runtime[ray-serve,bentoml,langchain,llama-index]' --editable ./server --editable ./compiler --group test
	$(BIN)/uv pip install --quiet --python $(MLSERVER) --editable './runtime[mlserver]' --editable ./server --editable ./compiler --group test
	$(ON_PLATFORMS) $(PLATFORMS)/bin/python -m pytest -n0 $(IN_SERVERS) tests/integration/test_ray_serve.py \
		tests/integration/test_langchain_and_llama_index.py
	$(ON_PLATFORMS) $(MLSERVER)/bin/python -m pytest -n0 $(IN_SERVERS)

hostile: $(READY) ## 500 random configurations, tokenizers, manifests and calls, and 600 of requests; writes its figures
	PREJIT_HOSTILE_EXAMPLES=125 $(BIN)/python -m pytest $(CAMPAIGN) tests/campaigns/test_hostile.py tests/integration/test_invariance.py

damage: $(READY) ## 20,000 changes of any file of a signed bundle, 200 by the command line (25 minutes); writes its figures
	PREJIT_DAMAGE_EXAMPLES=20000 $(BIN)/python -m pytest $(CAMPAIGN) tests/campaigns/test_damage.py

fuzz: $(READY) ## 100,000 hostile bundles through the checks, 2,000 through loads, and atheris at the parsers (2 hours)
	PREJIT_FUZZ_EXAMPLES=100000 $(BIN)/python -m tests.campaigns.fuzz
	PREJIT_LOADS_EXAMPLES=2000 $(BIN)/python -m tests.campaigns.loads
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check atheris==3.0.0
	PREJIT_FUZZ_SECONDS=120 $(BIN)/python -m tests.campaigns.parser_fuzz

chaos: $(READY) ## commands that break at every call on their files, and races of processes (3 hours); writes its figures
	PREJIT_CHAOS_EXAMPLES=100000 $(BIN)/python -m pytest $(CAMPAIGN) tests/campaigns/test_chaos.py tests/campaigns/test_races.py

broken-transfers: $(READY) ## 10,000 pulls and pushes that break, then go on (30 minutes); writes its figures
	PREJIT_BROKEN_EXAMPLES=10000 $(BIN)/python -m pytest $(CAMPAIGN) -n0 tests/campaigns/test_broken_transfers.py

evaluation: $(READY) ## lm-evaluation-harness against a server and beside torch (installs both, 1 GB; 5 minutes)
	test -d $(PREJIT_TEST_ENVIRONMENTS)/evaluation || $(PYTHON) -m venv $(PREJIT_TEST_ENVIRONMENTS)/evaluation
	$(PREJIT_TEST_ENVIRONMENTS)/evaluation/bin/python -m pip install --quiet torch==2.13.0 transformers accelerate 'lm_eval[api]==0.4.13'
	$(BIN)/python -m tests.campaigns.evaluation $(PREJIT_TEST_ENVIRONMENTS)/evaluation/bin/python

soak: $(READY) ## a server under mixed load for 8 minutes, then its log again (13 minutes); writes its figures
	PREJIT_SOAK_SECONDS=480 $(BIN)/python -m pytest $(CAMPAIGN) tests/campaigns/test_serving.py

swaps: $(READY) ## 100 swaps of a served bundle under 200 requests at once (7 minutes); writes its figures
	PREJIT_SWAPS=100 $(BIN)/python -m pytest $(CAMPAIGN) -n0 tests/campaigns/test_swaps.py

load-check: $(READY) ## the knee of `prejit load` beside an exhaustive search (14 minutes, a quiet machine)
	$(BIN)/prejit build manifests/demo.toml -o artifacts --target cpu-host
	PREJIT_LOAD_SECONDS=10 $(BIN)/python -m pytest $(CAMPAIGN) -n0 tests/campaigns/test_load.py

releases: $(READY) ## twenty bad releases and twenty good ones through gate and canary (40 minutes); writes its figures
	PREJIT_RELEASES=1 $(BIN)/python -m pytest $(CAMPAIGN) -n0 -s tests/campaigns/test_releases.py

drills: $(READY) ## failures of production, done on purpose under a real Prometheus (15 minutes); writes its figures
	PREJIT_DRILLS=1 $(BIN)/python -m pytest $(CAMPAIGN) -n0 tests/campaigns/test_drills.py
	$(BIN)/python -m tests.campaigns.drill_records # the table of benchmarks/results

hostile-clients: $(READY) ## an honest client beside hostile ones and 10,000 connections (13 minutes); writes its figures
	PREJIT_HOSTILE_SECONDS=600 $(BIN)/python -m pytest $(CAMPAIGN) -n0 tests/campaigns/test_hostile_clients.py

differential: $(READY) ## 100,000 calls of random functions beside jax.jit (30 minutes); writes its figures
	PREJIT_DIFFERENTIAL_CHECKS=100000 $(BIN)/python -m pytest $(CAMPAIGN) -n0 tests/campaigns/test_differential.py

UNTRACED = $(PREJIT_TEST_ENVIRONMENTS)/programs
untraced-programs: $(READY) ## 34 public JAX programs under `prejit run` without tracing (installs their libraries, 2 GB; an hour)
	test -d $(UNTRACED) || $(PYTHON) -m venv $(UNTRACED)
	$(UNTRACED)/bin/python -m pip install --quiet --editable runtime --editable server --editable compiler mujoco-mjx brax numpyro \
		blackjax diffrax equinox flax optax dm-haiku optimistix jaxopt e3nn-jax jraph tinygp jax-md distrax penzai gymnax evosax
	$(UNTRACED)/bin/python -m tests.campaigns.untraced_programs

untraced-mutations: $(READY) ## 10,000 changes of what a recorded program reads, and 100 starts beside Python (20 minutes)
	$(BIN)/python -m tests.campaigns.untraced_mutations 1 10000 100

docs: $(READY) $(DOCS_READY) ## generate the reference pages, build the documentation site into site/ and check its links
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/generate.py .site-source
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict
	$(BIN)/python docs/check_site.py site

dist: $(READY) ## build the three wheels into dist/
	for house in runtime server compiler; do $(BIN)/python -m build --outdir dist $$house || exit; done

demo-model: $(READY) ## train the demo model again
	$(BIN)/python -m pip install --quiet --group demo-model
	$(BIN)/python manifests/demo-model/train.py

clean: ## remove environments, bundles and caches of this checkout
	rm -rf .venv .venv-other .venv-gpu .venv-docs .venv-tools site .site-source .environments artifacts/*/ .pytest_cache .mypy_cache .ruff_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An empty environment with uv. One of another version of Python, as those of older checkouts are, is made again.
define venv
	@$(2) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "expected Python 3.11 or newer, found " + sys.version.split()[0] + " ($(2)): make PYTHON=python3.12 ...")'
	@echo 'setting up $(1) (a minute the first time)'
	@test "$$($(1)/bin/python -V 2>&1)" = "$$($(2) -V 2>&1)" || rm -rf $(1)
	@$(2) -m venv $(1)
	@$(1)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1' 'uv>=0.9'
endef

define environment
	$(call venv,$(1),$(2))
	@$(1)/bin/python -m scripts.install $(HOUSES) --group test --group lint
	@# Its dependencies would hold back ml_dtypes; without them it works with the newest.
	@$(1)/bin/python -m scripts.install --no-deps 'tritonclient>=2.60'
	@touch $(1)/.ready
endef

$(READY): $(SETTINGS)
	$(call environment,$(VENV),$(PYTHON))

$(OTHER_READY): $(SETTINGS)
	$(call environment,$(OTHER_VENV),$(OTHER))

$(TOOLS_READY): pyproject.toml
	$(call venv,$(TOOLS_VENV),$(PYTHON))
	@$(TOOLS_VENV)/bin/python -m scripts.install --group tools
	@touch $@

$(DOCS_READY): pyproject.toml
	$(call venv,$(DOCS_VENV),$(PYTHON))
	@$(DOCS_VENV)/bin/python -m scripts.install --group docs
	@touch $@
