#!/usr/bin/env bash
# Checks and measures everything that needs a GPU, in at most 9 minutes and without a network.
#
#   scripts/gpu/run.sh [--out DIR] [--rehearse] [--stages LIST]
#
# With --stages it continues a run: cases that have a good result in DIR are left out.
# Uses the folder that scripts/gpu/pack.sh has made and a Python on the machine that has PyTorch; where
# there is no such folder, the environment that scripts/setup.sh has made. PYTHON chooses another one.
set -euo pipefail
cd "$(dirname "$0")/../.."

site=$PWD/build/gpu_pack/site
needed='import sys
from importlib.util import find_spec
sys.exit(any(find_spec(name) is None for name in ("torch", "triton", "numpy", "vllm_ssdkv._io")))'

say() { printf 'run: %s\n' "$*" >&2; }

# Whether a Python has what a run needs.
fits() { "$1" -P -c "$needed" 2>/dev/null; }

python=
if [ -d "$site" ]; then
  for candidate in ${PYTHON:-python3 python3.12 .venv/bin/python}; do
    if PYTHONPATH=$site fits "$candidate"; then
      python=$candidate
      export PYTHONPATH=$site
      break
    fi
  done
fi
if [ -z "$python" ]; then
  if ! fits "${PYTHON:-.venv/bin/python}"; then
    say "no Python here has torch, triton and numpy and fits build/gpu_pack" \
      "($(paste -sd, build/gpu_pack/abi 2>/dev/null || echo 'which is not there')), and" \
      "${PYTHON:-.venv/bin/python} has no such package installed; scripts/gpu/pack.sh makes the" \
      "one, scripts/setup.sh the other"
    exit 2
  fi
  python=${PYTHON:-.venv/bin/python}
  [ ! -d "$site" ] || say "build/gpu_pack ($(paste -sd, build/gpu_pack/abi)) does not fit $python;" \
    "using the package that it has installed"
fi
exec "$python" -P -m vllm_ssdkv.profiling.gpu_pack "$@"
