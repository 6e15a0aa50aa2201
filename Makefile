# Two commands on a fresh machine: `make run` and `make test`. Everything else is convenience.

PYTHON ?= python3
JOBS ?= 2
DOCUMENT := examples/lighthouse.txt
QUESTION := What is the serial number of the replacement lamp motor?

compat_oldest := transformers==5.10.4
compat_newest := transformers>=5.10,<6

.DELETE_ON_ERROR:
.PHONY: help run test gpu-test lint model compat mutate clean

help:  ## list these commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## / /' | awk '{ n = $$1; $$1 = ""; printf "  make %-8s%s\n", n, $$0 }'

run: model  ## set up, fetch the default model, answer a question about a long document
	.venv/bin/kvkeep run $(DOCUMENT) "$(QUESTION)"

test: lint model  ## set up, then the linter and the whole test suite
	.venv/bin/python -m pytest -n $(JOBS) -q

gpu-test:  ## on a machine with a GPU and torch: the kernels, and the rest of what differs there
	PYTHONPATH=src python -m pytest -q tests/kernel_cases.py tests/kernel_cases_more.py tests/kernel_cases_packed.py tests/kernel_cases_gather.py tests/kernel_cases_apart.py tests/test_gpu.py tests/test_slots.py

lint: .venv/.ready  ## ruff
	.venv/bin/ruff check .

model: .venv/.ready  ## fetch the default model (once)
	.venv/bin/python -c "from kvkeep.model.default import fetch_default; fetch_default(print)"

compat: .venv-compat-oldest/.ready .venv-compat-newest/.ready  ## the core tests on the oldest and the newest transformers
	.venv-compat-oldest/bin/python -m pytest -n $(JOBS) -q -m core
	.venv-compat-newest/bin/python -m pytest -n $(JOBS) -q -m core

mutate: .venv/.ready  ## plant small faults, one at a time, and see whether tests notice (an hour)
	.venv/bin/python tests/mutate.py 150

clean:  ## remove environments and caches; the fetched model stays
	rm -rf .venv .venv-compat-oldest .venv-compat-newest build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written last, so an interrupted set-up is simply done again.
# torch comes first, alone and pinned: a looser request pulls gigabytes of CUDA.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install -q "$$(grep '^torch==' constraints.txt)"
	.venv/bin/pip install -q -c constraints.txt hatchling editables
	.venv/bin/pip install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

.venv-compat-%/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q "$$(grep '^torch==' constraints.txt)"
	grep -vE '^(transformers|huggingface_hub|tokenizers|hf-xet)==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/pip install -q -c $(@D)/constraints.txt hatchling editables
	$(@D)/bin/pip install -q -c $(@D)/constraints.txt --no-build-isolation -e '.[dev]' '$(compat_$*)'
	touch $@
