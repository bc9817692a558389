# make demo, make test: everything from a bare machine with Python 3.10 to 3.13 and make.
# make ... PYTHON=python3 VENV=    uses that interpreter with the packages it has, and installs nothing.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
THREADS ?= 1

ifeq ($(strip $(VENV)),)
python := $(PYTHON)
installed :=
recipes :=

# Where an environment forbids bytecode beside its packages, it is kept here: each of the many processes of the tests imports PyTorch.
ifdef PYTHONDONTWRITEBYTECODE
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX ?= $(CURDIR)/build/bytecode
endif
else
python := $(VENV)/bin/python
installed := $(VENV)/installed
recipes := $(VENV)/recipes

# Bytecode is made as modules are imported: making all of it at installation takes longer than the demo.
unexport PYTHONDONTWRITEBYTECODE

# A $(VENV) that this makes and cannot complete is removed again, interrupted too, so that the next attempt starts afresh.
$(VENV)/installed: pyproject.toml constraints.txt
	@python=$(PYTHON); other="choose another with make PYTHON=..."; \
	if test -e $(VENV); then python=$(VENV)/bin/python; other="remove $(VENV), then $$other"; fi; \
	command -v $$python >/dev/null || { echo "make: $$python: no such Python; $$other" >&2; exit 1; }; \
	$$python -c "import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))" || \
		{ echo "make: $$python: expected Python 3.10 to 3.13, found $$($$python --version 2>&1); $$other" >&2; exit 1; }
	@echo "Installing into $(VENV): PyTorch is a large download."
	@test -e $(VENV) || trap 'test -e $@ || rm -rf $(VENV)' EXIT; trap 'exit 1' INT TERM; set -e; \
	test -e $(VENV) || $(PYTHON) -m venv $(VENV); \
	$(VENV)/bin/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[dev]"; \
	touch $@

# Other libraries that tests look at, in a folder of their own: tests/recipes.txt says why. Tests of one that is not there are skipped.
$(VENV)/recipes: tests/recipes.txt $(VENV)/installed
	@rm -rf $@ $@.new
	@$(python) -m pip install --quiet --no-compile --no-deps --target $@.new --requirement tests/recipes.txt
	@mv $@.new $@ && touch $@
endif

recipes: $(recipes)

# One thread a worker: small operations on several threads wait for each other more than they compute. Plugins are used where they are installed.
pytest = OMP_NUM_THREADS=$(THREADS) $(python) -m pytest $$($(python) -c "from importlib.util import find_spec as has; \
	print('-n $(WORKERS) --dist worksteal' * bool(has('xdist')), '--timeout 600' * bool(has('pytest_timeout')))")

.DEFAULT_GOAL := help
.PHONY: help demo test test-full test-replay test-pytorch test-processors numerical test-kernels gpu memcheck prove lint docs test-wheel recipes bench

help:
	@echo "make demo          check this machine: equivalence with fp64, then a T5 and a Llama trained with eager attention and with dmattn"
	@echo "make test          all tests: the PyTorch path (and the GPU, where there is one), then the kernels in Triton's interpreter"
	@echo "make test-full     the same with more random problems and all that make test leaves out: every architecture called in every way,"
	@echo "                   every launch compiled; then make test-replay and make test-processors"
	@echo "make test-replay   repeated calls compared with the calls themselves (DMATTN_REPLAY=check), in the GPU's tests of the functions"
	@echo "make test-processors  what judges numbers in the first half, by each instruction set of this processor (ATEN_CPU_CAPABILITY:"
	@echo "                   default, avx2, avx512), with one thread and with two"
	@echo "make test-pytorch  the first half of make test"
	@echo "make test-kernels  the second half of make test"
	@echo "make gpu           the tests that need a GPU"
	@echo "make memcheck      every kernel under NVIDIA's compute-sanitizer: memory out of bounds, then races in shared memory (minutes, a GPU)"
	@echo "make prove         everything that a GPU alone can show, in one report: docs/proof.md and benchmarks/results/proof_<GPU>.json (8 minutes)"
	@echo "make lint          ruff and mypy"
	@echo "make docs          the documentation site, into build/site; a warning is an error"
	@echo "make test-wheel    sdist and wheel built, and tests run against the wheel in an environment of its own; FRESH=1 installs all that it needs,"
	@echo "                   and DIST=dist keeps what was built there"
	@echo "make bench         speed and equivalence of this machine's GPU, written to benchmarks/results/"

demo: $(installed)
	$(python) -m dmattn verify

test: test-pytorch test-kernels

test-full:
	DMATTN_FULL=1 DMATTN_EXAMPLES=500 $(MAKE) test-pytorch
	DMATTN_FULL=1 DMATTN_EXAMPLES=100 $(MAKE) test-kernels
	$(MAKE) test-replay
	$(MAKE) test-processors

# The files of tests, which lie in folders as what they test does, by their names.
files_of = $(foreach name,$(1),$(or $(wildcard $(patsubst %,%/test_$(name).py,tests tests/* tests/*/*)),$(error there is no test_$(name).py)))

# ATen obeys ATEN_CPU_CAPABILITY without asking the processor, so only those that it has. They differ in rounding, so a few files, in
# minutes, whose tests judge numbers by a rule: that of equivalence.py, or that of tests/models.py. Two threads have one worker: they wait
# for each other where cores are few.
capabilities = $$($(python) -c "from torch.backends.cpu import get_cpu_capability as most; names = ['DEFAULT', 'AVX2', 'AVX512']; \
	print(*(name.lower() for name in (names[:names.index(most()) + 1] if most() in names else names[:1])))")
judged := equivalence dropout dynamic functional random reference torch_kernel doge transformers transformers_dense_bias transformers_families

test-processors: $(installed)
	set -e; for capability in $(capabilities); do for threads in 1 2; do \
		echo "ATEN_CPU_CAPABILITY=$$capability, threads: $$threads"; \
		ATEN_CPU_CAPABILITY=$$capability TRITON_INTERPRET=0 $(MAKE) --no-print-directory numerical THREADS=$$threads \
			WORKERS=$$(($(WORKERS) / threads > 0 ? $(WORKERS) / threads : 1)); \
	done; done

numerical: $(installed)
	$(pytest) -m "not gpu" $(call files_of,$(judged))

# Without a GPU nothing else has a record: the fake one of tests/execution/fake_gpu.py stands in.
faked := tests/execution/test_replay.py tests/execution/test_replay_settings.py
repeating := bias_grad dropout dynamic equivalence functional hopper lifetimes module one_tile operators random resident rows split_keys top_keys varlen

test-replay: export DMATTN_REPLAY = check
test-replay: export TRITON_INTERPRET = 0
test-replay: $(installed)
	$(pytest) $(faked)
	if $(python) -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then $(pytest) -m gpu $(call files_of,$(repeating)); fi

test-pytorch: $(installed) $(recipes)
	TRITON_INTERPRET=0 $(pytest)

test-kernels: $(installed)
	TRITON_INTERPRET=1 $(pytest)

gpu: $(installed)
	TRITON_INTERPRET=0 $(pytest) -m gpu

memcheck: $(installed)
	TRITON_INTERPRET=0 compute-sanitizer --tool memcheck --error-exitcode 1 $(python) tests/memcheck.py
	@# It knows nothing of barriers in shared memory, by which Hopper's kernels wait, NVIDIA's own (nvjet) as well.
	TRITON_INTERPRET=0 compute-sanitizer --tool racecheck --kernel-name-exclude kernel_substring=nvjet --error-exitcode 1 \
		$(python) tests/memcheck.py --portable

# LIMIT is in seconds: the parts have their shares of that time, and say what they left.
LIMIT ?= 480

prove: $(installed)
	TRITON_INTERPRET=0 $(python) -m benchmarks.prove --seconds $(LIMIT)

lint: $(installed)
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy

# The theme warns of a successor of mkdocs unless told that this is known.
docs: $(installed)
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build

test-wheel: $(installed)
	$(python) tests/tools/installed_wheel.py $(if $(FRESH),,--share-packages) $(if $(DIST),--dist $(DIST))

bench: $(installed)
	$(python) benchmarks/speed.py
	$(python) benchmarks/forward_equivalence.py
	$(python) benchmarks/backward_equivalence.py
	$(python) benchmarks/dynamic_mask.py
