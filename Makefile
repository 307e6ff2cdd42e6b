# Unicorn Execution Engine. Two commands do everything: `make serve` and `make test`.
#
#   make serve                     install what is missing, build, serve the demo model on 127.0.0.1:8010
#   make serve MODEL=smollm2       the same with SmolLM2-135M, a small trained model: a download of 98 MB; MODEL=DIR serves another
#   make serve ARGS="--context 4096"  serve with options of `unicorn serve`
#   make test                      everything the tests need, then all tests; the last line counts them
#   make check                     format, import rules, engine, API and text without a GPU; under 2 minutes after a change
#   make test-clients              only the tests in which clients from the package registries use a server
#   make test-lm-eval              lm-eval with a server, compared with `unicorn eval`; a GiB of Python packages
#   make test-scaling              two servers behind HAProxy and the LiteLLM proxy, one killed; 750 MB of packages, minutes
#   make test-real                 all tests with SmolLM2, where `make test` uses only the quick ones
#   make test-demo                 all questions of the demo model's set, where `make test` uses only the quick ones
#   make test-kernels              tests of kernels, families and batches with every scheme of weights and every shape, where `make test` uses some
#   make test-random               all random inputs of parsers, grammars and requests, where `make test` uses a quarter of them
#   make page-libraries            build src/api/page/libraries again, after a change in tools/page_libraries; needs npm
#   make test-openwebui            install Open WebUI (2 GB of disk), and test it with a browser and a server; minutes
#   make conformance               run the tests of llama.cpp's and vLLM's servers; writes docs/conformance.md; minutes
#   make edges                     edge cases of the shipped binary: lost log readers and devices, hostile clients; slow
#   make hostile-pictures          what pictures of every kind, damaged ones and one of 100 megapixels cost the server
#   make test-faults               edge cases and suites with failing devices and killed processes; slow
#   make soak-models               five models on memory for two, 16 clients and killed processes, for 20 minutes; ARGS=5 is shorter
#   make soak                      every route for half an hour, with lost devices and clients; ARGS=5m is shorter
#   make test-packages             install the Debian package, the archive and the container on new machines; as root, minutes
#   make test-service              install and test the service in a container that boots systemd; as root, minutes
#   make test-fresh RELEASE=bookworm  `make serve` and `make test` on a new machine in a chroot; as root, an hour
#   make test-agents               install Codex and Claude Code (700 MB of disk), and have each run a command for a task; minutes
#   make test-27b                  write, load and query a 27B with random weights; 16 GB of disk and of memory, minutes
#   make test-26b                  the same of a mixture of experts, Gemma 4 26B-A4B
#   make test-devices              kernels and goldens on every device that replaces a GPU, as a table; half an hour
#   make npu-shim                  libunicorn_npu.so, through which the program uses this machine's XRT and NPU
#   make bench                     load time, prefill and decode speed, memory
#   make bench-step                host time of a decode step of 62 layers
#   make bench-host                host time per token: scheduler, blocks, grammars, text; needs no GPU
#   make gpu-bench                 the folder target/gpu-bench, with a script that checks and measures another machine's GPU
#   make bench-serve               start a server, measure it under load, stop it; the server's options in SERVE_ARGS
#   make release                   target/release-VERSION: archive and Debian package of the checked-out commit
#   make test-release              build both in two folders, and compare them; half an hour
#   make install                   after `make build`, as root: binary, systemd unit, user, /etc/unicorn/config.toml
#   make uninstall                 remove binary, unit and the user's definition; configuration and models stay
#   make setup-devices             devices that replace GPUs, in .cache/devices: 340 MB; does not change the system
#   make lab                       build the second binary too, target/debug/unicorn-lab, which measures and predicts
#   make build | setup | setup-test | lint | clean | help

# `make check` compiles the crate with opt-level 0 (CARGO_PROFILE_DEV_OPT_LEVEL), which takes a third of the time, and in
# many units, of which a change recompiles few; its dependencies stay optimized. So `make check` and `make test` each have their own build of the crate in target/debug.

# The bin folder of rustup. A shell that was opened before the installation of Rust does not have it in its PATH.
export PATH := $(HOME)/.cargo/bin:$(PATH)
# Keeps the compiled shaders of the software driver, so that only the first run compiles them with LLVM.
export MESA_SHADER_CACHE_DIR ?= $(CURDIR)/.cache/mesa

UNICORN := target/debug/unicorn
PREFIX ?= /usr/local
DESTDIR ?=
ARGS ?=
MODEL ?=
# A model that this Makefile fetches; the others are for --model.
SMOLLM2 := .cache/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
SERVE_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup setup-test setup-devices test-devices npu-shim build lab check serve bench bench-step bench-host bench-serve gpu-bench test test-clients test-lm-eval test-scaling test-demo test-real test-kernels test-random smollm2 page-libraries test-openwebui test-agents test-27b test-26b test-fresh test-service test-packages release test-release conformance edges hostile-pictures test-faults soak soak-models install uninstall lint clean

help:
	@sed -n 's/^#   //p' $(firstword $(MAKEFILE_LIST))

setup:
	@python3 tools/setup.py run

setup-test:
	@python3 tools/setup.py test

test-devices: setup-test
	@python3 tools/test.py all-devices

setup-devices:
	@python3 tools/setup.py devices

npu-shim:
	@tools/npu_shim.sh

build: setup
	cargo build --locked --bin unicorn

# The second binary, which measures and predicts.
lab: setup
	cargo build --locked --bins

serve: build $(if $(filter smollm2,$(MODEL)),smollm2)
	@tools/with_device.sh $(UNICORN) serve $(if $(MODEL),--model $(patsubst smollm2,$(SMOLLM2),$(MODEL))) $(ARGS)

smollm2:
	@python3 tools/setup.py smollm2
	@tools/fetch_smollm2.sh

# This target does not build, because root's cargo would leave files that belong to root.
release:
	@python3 tools/setup.py release
	@python3 tools/release.py

test-release:
	@python3 tools/setup.py release
	@python3 tools/release.py --twice

install:
	@PREFIX="$(PREFIX)" DESTDIR="$(DESTDIR)" tools/install.sh $(UNICORN)

uninstall:
	rm -f $(DESTDIR)$(PREFIX)/bin/unicorn $(DESTDIR)$(PREFIX)/lib/unicorn/libunicorn_npu.so \
	      $(DESTDIR)$(PREFIX)/lib/systemd/system/unicorn.service \
	      $(DESTDIR)$(PREFIX)/lib/systemd/system/unicorn.socket $(DESTDIR)$(PREFIX)/lib/sysusers.d/unicorn.conf \
	      $(DESTDIR)$(PREFIX)/share/man/man1/unicorn.1 $(DESTDIR)$(PREFIX)/share/man/man1/unicorn-*.1 \
	      $(DESTDIR)$(PREFIX)/share/bash-completion/completions/unicorn \
	      $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_unicorn \
	      $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/unicorn.fish

bench: build
	@tools/with_device.sh $(UNICORN) bench $(ARGS)

bench-host: setup
	cargo bench --profile dev --locked --bench host -- $(ARGS)

bench-step: build
	@python3 tools/bench_step.py tools/with_device.sh $(UNICORN) $(ARGS)

gpu-bench: setup
	@python3 tools/gpu_bench.py

bench-serve: build
	@SERVE_ARGS="$(SERVE_ARGS)" tools/bench_serve.sh $(UNICORN) $(ARGS)

# Test folders and files that need no Vulkan device, and their tests that are slow without optimization. Some of those
# would exceed a time limit of the program on a busy machine.
CHECKED := api text engine::scripted house::tidy cli::config
NOT_CHECKED := scripted::the_scheduler_keeps openapi::bodies_that_the_document random_ mutated_ the_real_ \
	gbnf::large_ grammar::objects_ jinja::long_ jinja::templates_ jinja::values_ schemas::every_keyword tokens::a_megabyte tokens::hostile_

check:
	cargo fmt --check
	CARGO_PROFILE_DEV_OPT_LEVEL=0 CARGO_PROFILE_DEV_CODEGEN_UNITS=256 cargo test --locked --test suite -- $(CHECKED:%=%::) $(NOT_CHECKED:%=--skip %)

test: setup-test
	@python3 tools/test.py

# The same build as in `make test`, so that neither recompiles the dependencies with other features.
BUILD_TESTS := cargo build --locked --bins --examples --test suite

test-clients: setup-test
	$(BUILD_TESTS)
	@python3 tools/test.py clients document

test-lm-eval: setup-test
	$(BUILD_TESTS)
	@python3 tools/test.py lm-eval

test-scaling: build setup-test
	@python3 tools/test.py all-scaling

test-real: setup-test smollm2
	UNICORN_TEST_REAL=all cargo test --locked --test suite smollm2:: byte_level_tokenizers_of -- --nocapture

test-demo: setup-test
	UNICORN_TEST_DEMO=all cargo test --locked --test suite demo:: -- --nocapture

test-kernels: setup-test
	UNICORN_TEST_KERNELS=all cargo test --locked --test suite -- kernels:: model::families packed_matrices_of_every_family engine::draft engine::batching

test-random: setup-test
	UNICORN_TEST_RANDOM=all cargo test --locked --test suite -- damaged_ corrupted_ bodies_that_the_document random_grammars random_answers_to mutated_schemas

page-libraries:
	@python3 tools/test.py page-libraries

test-openwebui: setup-test smollm2
	@python3 tools/test.py openwebui

test-agents: setup-test
	@python3 tools/test.py agents

test-27b: lab
	@python3 tools/setup.py measure
	@python3 tools/test_27b.py $(ARGS)

test-26b: lab
	@python3 tools/setup.py measure
	@python3 tools/test_27b.py --shape gemma-4-26b-a4b --dir target/synth-26b $(ARGS)

conformance: setup-test
	cargo build --locked --bin unicorn
	@python3 tools/conformance.py $(ARGS)

edges: lab
	cargo build --locked --example fault_layer
	@python3 tools/edges.py $(ARGS)

hostile-pictures: build
	@python3 tools/hostile_pictures.py

test-faults: lab
	cargo test --locked --test suite -- faults:: recovery::
	@python3 tools/edges.py faults

soak-models: setup-test smollm2
	UNICORN_TEST_SWAPS=$(or $(ARGS),20) UNICORN_TEST_SMOLLM2=$(CURDIR)/.cache/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf \
		cargo test --locked --test suite -- --nocapture models_swap_under_load

soak: lab
	cargo build --locked --example fault_layer
	@python3 tools/soak.py $(ARGS)

test-service: build
	@python3 tools/setup.py service
	@python3 tools/setup.py release
	@tools/test_service.sh $(UNICORN) $(MIRROR)

test-packages: build
	@python3 tools/setup.py packages
	@python3 tools/test_packages.py $(UNICORN) $(ARGS)

test-fresh:
	@python3 tools/setup.py service
	@python3 tools/fresh_machine.py $(RELEASE)

lint:
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings

clean:
	rm -rf target .venv .cache
