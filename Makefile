# Every target sets up what it needs, once: .venv with pinned packages, then the extension. The machine needs only python3, cargo, make
# and cc.
.DELETE_ON_ERROR:
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules
SHELL := /bin/bash -euo pipefail

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
# Python must be free to write byte code. Without it every process compiles torchrec and what that needs again: 17 s instead of 7 s.
unexport CONDA_PREFIX PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE
# All cargo commands use one interpreter. pyo3 is rebuilt whenever the interpreter changes.
export PYO3_PYTHON := $(CURDIR)/$(PY)
export CARGO_TERM_PROGRESS_WHEN ?= never

# The flavour of fbgemm follows the machine: the one for CUDA cannot be imported without a driver.
FLAVOUR ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
# uv brings certificates of its own. Use the system's as pip does, so that mirrors with a certificate of their own work.
SYSTEM_CERTS := $(if $(wildcard /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/cert.pem),--system-certs)
# The environment is made again when a pin, the flavour or the folder changes (its scripts contain absolute paths).
REQUIREMENTS := requirements/uv.txt requirements/runtime.txt requirements/$(FLAVOUR).txt requirements/dev.txt
ENVIRONMENT := $(VENV)/.made-$(shell { cat $(REQUIREMENTS); echo $(CURDIR); } | cksum | tr ' ' -)
# The packages for the docs site are installed when the site is first made.
DOCS := $(VENV)/.docs-$(shell cksum <requirements/docs.txt | tr ' ' -)
# The extension is built again when a source or a folder of sources is newer than it.
NATIVE := $(VENV)/.native
# Exists while the extension is a dev build. The release stamp is then missing, so that targets that need the extension build it again.
DEV := $(VENV)/.dev
DEVELOP = PATH="$(CURDIR)/$(BIN):$$PATH" $(PY) -m maturin develop --locked --uv
NATIVE_SOURCES := Cargo.toml Cargo.lock pyproject.toml $(shell find rust/core rust/pyext)

.PHONY: help setup dev fmt demo test test-all test-rust test-loom test-python test-python-fast test-cuda sanitize-cuda bench-cuda fuzz stress lint docs rivals bench bench-docs bench-smoke wheel clean
help:
	@echo "make demo         train a DLRM on MovieLens-100K over three tiers, save it, load it elsewhere, compare every row; a report in target/demo"
	@echo "make test         the Rust tests and the fast Python tests; make test-all also runs the loom models and the tests marked slow or docs"
	@echo "make test-cuda    the tests of the kernels and of pipelines on a GPU, held against the core's on the CPU; make bench-cuda measures them"
	@echo "make sanitize-cuda  the tests of the kernels on a GPU under compute-sanitizer"
	@echo "make fuzz         the fuzz targets of everything that reads from disk, for FOR=300 seconds"
	@echo "make stress       everything at once on small tables, kills and power cuts, TIMES=20 as long as in make test-all"
	@echo "make dev          the extension in the dev profile: checked, slower, quickly rebuilt; other targets build it in release again"
	@echo "make fmt          format the Rust and Python sources, and apply the fixes of ruff"
	@echo "make lint         format, lints, types, stubs, import directions, sizes, catalogs"
	@echo "make docs         the docs site with the reference of every public name, and rustdoc of the core, into target/docs"
	@echo "make bench        every benchmark beside its limit and rivals, into target/bench/results.json (ONLY=name,name: some; AGAINST=tree: and another checkout, in turn)"
	@echo "make bench-docs   docs/benchmarks.md and its plots from what make bench measured"
	@echo "make bench-smoke  every benchmark briefly, as a test"
	@echo "make rivals       RocksDB and LMDB for the benches, from the system or out of its packages, into target/rivals"
	@echo "make wheel        a wheel for other machines and the sdist, checked, into dist"
	@echo "make clean        remove what was built"

setup: $(NATIVE)

$(ENVIRONMENT): $(REQUIREMENTS)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"Python 3.11 or newer is needed and $(PYTHON) is {v[0]}.{v[1]}: name another, as in make PYTHON=python3.12 demo")'
	@echo "setting up $(VENV) ($(FLAVOUR)): torch, torchrec, fbgemm and what tests need"
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) -m venv failed: on Debian and Ubuntu, apt install python3-venv" >&2; exit 1; }
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/uv.txt
	@$(PY) -m uv $(SYSTEM_CERTS) pip install --python $(PY) --no-deps -r requirements/$(FLAVOUR).txt -r requirements/dev.txt
	@touch $@

HAS_RUST = { command -v cargo >/dev/null || { echo "cargo is not on the PATH: install Rust from https://rustup.rs" >&2; exit 1; }; \
	command -v cc >/dev/null || { echo "cc is not on the PATH: install a C compiler (it links Rust programs), as in apt install gcc" >&2; exit 1; }; }

$(NATIVE): $(ENVIRONMENT) $(NATIVE_SOURCES)
	@$(HAS_RUST)
	@echo "building the extension: a line for each crate; the last two take minutes"
	@$(DEVELOP) --release
	@rm -f $(DEV)
	@touch $@

# For the loop of a contributor (see CONTRIBUTING.md): cargo's dev profile, which builds incrementally, or PROFILE=release. Both keep
# symbols and line tables here.
dev: $(ENVIRONMENT)
	@$(HAS_RUST)
	@rm -f $(NATIVE)
	@touch $(DEV)
	@$(DEVELOP) --profile $(or $(PROFILE),dev) --config profile.release.package.embcache-pyext.strip=false
	@echo "the extension is a dev build, for .venv/bin/python; make test, demo, bench and others build it in release first"

demo: $(NATIVE)
	@$(PY) examples/movielens_dlrm.py $(ARGS)

test: test-rust test-python-fast

test-all: test-rust test-loom test-python

# Targets that need a GPU. Without one both report it and fail.
HAS_CUDA = $(PY) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "no CUDA device is here, so nothing was done: torch.cuda.is_available() is False")'
CUDA_TESTS = $(addprefix tests/python/kernels/,test_triton_kernels.py test_device_pipelines.py test_device_faults.py test_device_threads.py)
test-cuda: $(NATIVE)
	@$(HAS_CUDA)
	@EMBCACHE_TEST_CUDA=1 $(PY) -m pytest -q $(CUDA_TESTS) $(ARGS)

# Memory that a kernel must not touch, and shared memory that two threads of it use at once.
sanitize-cuda: $(NATIVE)
	@$(HAS_CUDA)
	@command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not on the PATH: it is part of the CUDA toolkit" >&2; exit 1; }
	@for tool in memcheck racecheck; do \
		EMBCACHE_TEST_CUDA=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --target-processes all --error-exitcode 1 \
			$(PY) -m pytest -q tests/python/kernels/test_triton_kernels.py $(ARGS) || exit 1; \
	done

bench-cuda: $(NATIVE)
	@$(HAS_CUDA)
	@$(PY) benches/python/cuda.py
	@$(PY) benches/python/cuda_dlrm.py

# Neither these tests nor the models of loom need Python.
test-rust:
	@if cargo nextest --version >/dev/null 2>&1; then \
		cargo nextest run --locked --no-tests=pass --no-fail-fast && cargo test --quiet --locked --doc; \
	else \
		cargo test --quiet --locked --no-fail-fast; \
	fi

# The loom models: every interleaving of a few threads on a slot's pins and, with at most two preemptions, in the SSD tier and in a table.
# They have a target directory of their own, because the flag changes every crate.
test-loom:
	@RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test --quiet --locked -p embcache --lib loom

# Two processes share the files of tests, in the order of tests/python/conftest.py. With ARGS, as for one test or a debugger, there is one.
# Threads of torch that wait sleep: by default they keep a core busy, which others need.
test-python test-python-fast: export OMP_WAIT_POLICY := passive
TWO_PROCESSES = --numprocesses=2 --dist=loadfile --no-loadscope-reorder
test-python: $(NATIVE)
	@$(PY) -m pytest $(or $(ARGS),$(TWO_PROCESSES))

test-python-fast: $(NATIVE)
	@$(PY) -m pytest -m "not slow and not docs" $(or $(ARGS),$(TWO_PROCESSES))

fuzz:
	@EMBCACHE_FUZZ_S=$(or $(FOR),300) cargo test --quiet --locked -p embcache-tests --test hostile

# Run by root on a machine with loop devices, the soak also cuts the power of file systems of its own. It says so where it cannot.
stress: export EMBCACHE_STRESS := $(or $(TIMES),20)
stress: $(NATIVE)
	@EMBCACHE_WATCHDOG_S=7200 cargo test --quiet --locked -p embcache-tests --test stress
	@cargo test --quiet --locked -p embcache-tests --test crash -- stop::
	@$(PY) -m pytest --log-cli-level=INFO tests/python/soak/test_soak.py

fmt: $(ENVIRONMENT)
	cargo fmt --all
	$(PY) -m ruff check --fix --exit-zero
	$(PY) -m ruff format

lint: $(NATIVE)
	cargo fmt --all --check
	cargo clippy --quiet --locked --workspace --all-targets -- -D warnings
	cargo clippy --quiet --locked -p embcache -p embcache-pyext -- -D warnings
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) tools/lint
	$(PY) -m mypy
	$(BIN)/basedpyright
	$(PY) -m mypy.stubtest --concise --allowlist tests/stubtest_allowlist.txt torchrec_embcache._native

$(DOCS): requirements/docs.txt $(ENVIRONMENT)
	@$(PY) -m uv $(SYSTEM_CERTS) pip install --quiet --python $(PY) --no-deps -r requirements/docs.txt
	@touch $@

# It reads sources, and so needs no extension. A warning, such as of a link that leads nowhere, is an error. (With --quiet mkdocs
# would not count warnings.) rustdoc has a target directory of its own, because the Rust tests lock the other one while they are built.
docs: $(DOCS)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict 2>&1 | { grep -v "^INFO" || true; }
	@RUSTDOCFLAGS="-D warnings" CARGO_TARGET_DIR=target/rustdoc cargo doc --quiet --locked --no-deps -p embcache
	@rm -rf target/docs/rust
	@cp -r target/rustdoc/doc target/docs/rust
	@echo "the docs are in target/docs/index.html; $(PY) -m http.server --directory target/docs serves them, with their search"

# Where the libraries cannot be had, the benches run without the rivals and say so.
rivals:
	@benches/rivals/libraries.sh target/rivals

bench: $(NATIVE) rivals
	@$(PY) benches/python/run.py $(if $(ONLY),--only $(ONLY)) $(if $(AGAINST),--against $(AGAINST))

bench-docs: $(ENVIRONMENT)
	@$(PY) benches/python/document.py

bench-smoke: export OMP_WAIT_POLICY := passive
bench-smoke: $(NATIVE) rivals
	@$(PY) benches/python/run.py --smoke $(if $(ONLY),--only $(ONLY))

# The wheel for other machines. zig links it against the glibc of manylinux_2_28, whichever this machine has, into a target directory of
# its own. Paths of this machine, which panics of crates would tell, are replaced.
REMAPPED := --remap-path-prefix=$(or $(CARGO_HOME),$(HOME)/.cargo)/registry/src=registry --remap-path-prefix=$(CURDIR)=.
wheel: $(NATIVE)
	@$(PY) -m uv $(SYSTEM_CERTS) pip install --quiet --python $(PY) --no-deps -r requirements/wheel.txt
	@rm -rf dist
	@PATH="$(CURDIR)/$(BIN):$$PATH" RUSTFLAGS="$(REMAPPED)" $(PY) -m maturin build --quiet --release --locked --zig --compatibility manylinux_2_28 --out dist
	@$(PY) -m maturin sdist --out dist
	@$(PY) -m twine check --strict dist/*
	@$(PY) -m auditwheel show dist/*.whl
	@$(PY) tests/python/support/wheels.py dist

clean:
	rm -rf target $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find python tests tools examples benches -name __pycache__ -prune -exec rm -rf {} +
	find python -name '*.so' -delete
