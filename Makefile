# Two commands on a fresh machine: `make run` and `make test`. Everything else is convenience.

PYTHON ?= python3
JOBS ?= 2
# Seconds that a test may take on a slow machine: one that hangs is named.
LONGEST ?= 900
DOCUMENT := examples/lighthouse.txt
QUESTION := What is the serial number of the replacement lamp motor?
ANSWER := 4827163
TORCH = "$$(grep '^torch==' constraints.txt)"

compat_oldest := transformers==5.10.4
compat_newest := transformers>=5.10,<6

FAULTS ?= 120
SEED ?= 0
MUTMUT = PYTHONPATH=$(CURDIR)/mutants/src OMP_NUM_THREADS=1 .venv-mutate/bin/mutmut

.DELETE_ON_ERROR:
.PHONY: help run test test-all clients docs notebooks first-run gpu-test lint model compat mutate clean

help:  ## list these commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## / /' | awk '{ n = $$1; $$1 = ""; printf "  make %-10s%s\n", n, $$0 }'

run: model  ## set up, fetch the default model, answer a question about a long document
	.venv/bin/kvkeep run $(DOCUMENT) "$(QUESTION)"

test: lint model  ## set up, then the linter and the tests: up to 4 cases of each, without slow ones
	.venv/bin/python -m pytest -n $(JOBS) --dist loadgroup --timeout $(LONGEST) -q -m "not slow" --cases 4

test-all: lint model  ## the same with all cases of all tests
	.venv/bin/python -m pytest -n $(JOBS) --dist loadgroup --timeout $(LONGEST) -q

clients: .venv/.dev .venv-clients/.ready  ## other people's clients, against a server of a tiny model
	SERVER_PYTHON=.venv/bin/python .venv-clients/bin/python -m pytest -q --confcutdir tests/clients -W default tests/clients/client_cases.py

docs: .venv/.docs  ## the documentation site, in site/; open site/index.html
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet

notebooks: .venv/.dev model  ## run the notebooks of examples/ again, and write what they say into them
	.venv/bin/python docs/execute.py examples/*.ipynb

first-run:  ## an empty environment, no extras, a fresh model folder, one question
	rm -rf .venv-first
	$(PYTHON) -m venv .venv-first
	.venv-first/bin/pip install -q $(TORCH)
	.venv-first/bin/pip install -q -c constraints.txt .
	KVKEEP_HOME="$(CURDIR)/.venv-first/home" .venv-first/bin/kvkeep run $(DOCUMENT) "$(QUESTION)" > .venv-first/said
	cat .venv-first/said
	grep -q $(ANSWER) .venv-first/said
	rm -rf .venv-first

gpu-test:  ## on a machine with a GPU and torch: the kernels, and other GPU code
	PYTHONPATH=src python -m pytest -q tests/kernels/*_cases.py tests/test_gpu.py tests/engine/test_pooled_batch.py tests/kernels/test_reference.py tests/cache/test_captured_decode.py

lint: .venv/.dev  ## ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/python -m mypy

model: .venv/.ready  ## fetch the default model (once)
	.venv/bin/python -c "from kvkeep.model.default_model import fetch_default; fetch_default(print)"

compat: .venv-compat-oldest/.ready .venv-compat-newest/.ready  ## the core tests on the oldest and the newest transformers
	.venv-compat-oldest/bin/python -m pytest -n $(JOBS) -q -m core
	.venv-compat-newest/bin/python -m pytest -n $(JOBS) -q -m core

mutate: .venv-mutate/.ready  ## mutation tests: FAULTS mutants, as many of each folder, sampled with SEED
	mkdir -p mutants/src
	-$(MUTMUT) run --max-children 1 none > mutants/baseline 2>&1  # creates the mutants and times the tests; the sample is run next
	.venv-mutate/bin/python .ci/mutants.py draw $(SEED) $(FAULTS) > mutants/drawn
	$(MUTMUT) run --max-children 1 $$(cat mutants/drawn) > mutants/said
	.venv-mutate/bin/python .ci/mutants.py score < mutants/said

clean:  ## remove environments and caches; the fetched model stays
	rm -rf .venv .venv-first .venv-clients .venv-compat-oldest .venv-compat-newest .venv-mutate mutants build dist site .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written last, so an interrupted set-up is simply done again.
# torch comes first, alone and pinned: a looser request pulls gigabytes of CUDA. `make run` needs no more than .ready.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install -q $(TORCH)
	.venv/bin/pip install -q -c constraints.txt hatchling editables
	.venv/bin/pip install -q -c constraints.txt --no-build-isolation -e .
	touch $@

.venv/.dev: .venv/.ready
	.venv/bin/pip install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

.venv/.docs: .venv/.ready
	.venv/bin/pip install -q -c constraints.txt --no-build-isolation -e '.[docs]'
	touch $@

# without torch: these clients ask for other versions of what .venv has
.venv-clients/.ready: tests/clients/requirements.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q -r tests/clients/requirements.txt
	touch $@

.venv-compat-%/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q $(TORCH)
	grep -vE '^(transformers|huggingface_hub|tokenizers|hf-xet)==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/pip install -q -c $(@D)/constraints.txt hatchling editables
	$(@D)/bin/pip install -q -c $(@D)/constraints.txt --no-build-isolation -e '.[dev]' '$(compat_$*)'
	touch $@

# mutmut asks pytest for what it has no more since version 9
.venv-mutate/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q $(TORCH)
	grep -v '^pytest==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/pip install -q -c $(@D)/constraints.txt hatchling editables
	$(@D)/bin/pip install -q -c $(@D)/constraints.txt --no-build-isolation -e '.[dev]' mutmut==3.8.0 pytest==8.4.2
	touch $@
