#!/usr/bin/env bash
# Checks and measures everything that needs a GPU and no vLLM, in at most 9 minutes and without a
# network.
#
#   scripts/gpu/run.sh [--out DIR] [--rehearse] [--stages LIST]
#
# Uses the folder that scripts/gpu/pack.sh has made and a Python on the machine that has PyTorch; where
# there is no such folder, the environment that scripts/setup.sh has made. PYTHON chooses another one.
set -euo pipefail
cd "$(dirname "$0")/../.."

site=$PWD/build/gpu_pack/site

# Whether a Python can run what has been packed.
fits() {
  PYTHONPATH=$site "$1" -P -c 'import sys
from importlib.util import find_spec
sys.exit(any(find_spec(name) is None for name in ("torch", "triton", "numpy", "vllm_ssdkv._io")))' \
    2>/dev/null
}

python=
if [ -d "$site" ]; then
  for candidate in ${PYTHON:-python3 python3.12 .venv/bin/python}; do
    if fits "$candidate"; then
      python=$candidate
      break
    fi
  done
  if [ -n "$python" ]; then
    export PYTHONPATH=$site
  elif [ -n "${PYTHON:-}" ] || [ ! -x .venv/bin/python ]; then
    printf 'run: no Python here has torch, triton and numpy and fits build/gpu_pack (%s)\n' \
      "$(cat build/gpu_pack/abi)" >&2
    exit 2
  else
    printf 'run: build/gpu_pack fits no Python here that has torch (%s); using .venv\n' \
      "$(cat build/gpu_pack/abi)" >&2
  fi
fi
if [ -z "$python" ]; then
  python=${PYTHON:-.venv/bin/python}
  if ! "$python" -P -c 'import vllm_ssdkv._io' 2>/dev/null; then
    printf 'run: no build/gpu_pack (scripts/gpu/pack.sh makes it) and no installed .venv\n' >&2
    exit 2
  fi
fi
exec "$python" -P -m vllm_ssdkv.profiling.gpu_pack "$@"
