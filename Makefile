# Each target sets up what it needs on a fresh machine: a virtual environment, the package, then the job itself.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python

.PHONY: demo test test-kernels test-sglang test-vllm docs check lint types layers clean

demo: $(VENV)/.installed
	$(VENV)/bin/mezzo train

# Two at a time, a thread each: most tests are too small to use two cores.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(RUN) -m pytest --numprocesses 2 --dist worksteal

# The GPU's kernels on the CPU, interpreted by Triton, which SGLang's environment has.
KERNELS := $(addprefix tests/torch_engine/test_,kernels.py decoder.py encoder.py kernel_forwards.py pipeline.py)
test-kernels:
	PYTHON=$(PYTHON) scripts/sglang_env/build.sh .venv-sglang
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 .venv-sglang/bin/python -m pytest --numprocesses 2 --dist worksteal $(KERNELS)

# The real SGLang on the CPU, in an environment of its own that is built once.
test-sglang:
	PYTHON=$(PYTHON) scripts/sglang_env/build.sh .venv-sglang
	.venv-sglang/bin/python -m pytest tests/sglang tests/test_engine_contract.py

# The same for vLLM. Not part of .ci/run; docs/vllm.md has the last result.
test-vllm:
	PYTHON=$(PYTHON) scripts/vllm_env/build.sh .venv-vllm
	HF_HUB_OFFLINE=1 .venv-vllm/bin/python -m pytest tests/vllm tests/test_engine_contract.py

# The documentation as a site, in site/.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

check: lint types layers

lint: $(VENV)/.installed-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(VENV)/.installed-dev
	$(RUN) -m mypy

layers: $(VENV)/.installed-dev
	$(VENV)/bin/lint-imports

# torch first and alone: pip then takes the pinned build, and the package's open range is satisfied by it.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --constraint constraints.txt torch
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
