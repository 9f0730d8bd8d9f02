#!/usr/bin/env bash
# Makes dist/: a source archive, and the wheel that is built from it, for manylinux where auditwheel
# finds a tag. The wheel is then installed with what it says it needs into an environment of its own.
#
# The tag is set by the C library and compiler of this machine: Debian 12 and Ubuntu 22.04 make
# manylinux_2_35. Run it on the oldest distribution that the wheel is for. liburing is linked statically
# where there is a static one, otherwise auditwheel adds the shared one; libcrypto is loaded when
# encryption is asked for, so it is no part of the wheel.
set -euo pipefail
cd "$(dirname "$0")/.."

bin=$PWD/.venv/bin
raw=build/wheel_raw
trial=build/wheel_trial
export PATH="$bin:$PATH"

say() { printf 'wheel: %s\n' "$*"; }

fail() {
  printf 'wheel: %s\n' "$*" >&2
  exit 1
}

build_from_sdist() {
  say "source archive, and a wheel from it"
  rm -rf "$raw"
  python -m build --no-isolation --outdir "$raw" . >"$raw.log" 2>&1 ||
    { tail -n 40 "$raw.log" >&2 && fail "the build failed, $raw.log has all of it"; }
  version=$(basename "$raw"/*.tar.gz .tar.gz)
  version=${version##*-}
}

# A release is a tag, and the tag says the version that the files say.
check_tag() {
  local tag
  for tag in $(git tag --points-at HEAD 2>/dev/null); do
    [[ $tag != v* || $tag == "v$version" ]] || fail "tag $tag, but the version is $version"
  done
}

repair() {
  rm -rf "$raw/repaired"
  if auditwheel repair --wheel-dir "$raw/repaired" "$raw"/*.whl >"$raw/auditwheel.log" 2>&1; then
    wheel=$(echo "$raw"/repaired/*.whl)
  else
    auditwheel show "$raw"/*.whl || true
    say "no manylinux tag: the symbols above are newer than any that auditwheel knows, or a library" \
      "is missing ($raw/auditwheel.log); this wheel is for machines like this one"
    wheel=$(echo "$raw"/*.whl)
  fi
}

# First with nothing but what the wheel requires, then beside the vLLM of .venv.
try_wheel() {
  say "trying $(basename "$wheel")"
  rm -rf "$trial"
  python -m venv "$trial"
  "$trial/bin/pip" install -qq --disable-pip-version-check "$wheel"
  (
    cd "$trial"
    bin/python -P -c 'import vllm_ssdkv._io, vllm_ssdkv._index, vllm_ssdkv._kernels'
    [ "$(bin/ssdkv --version)" = "$version" ] || fail "ssdkv --version does not say $version"
    bin/ssdkv lab fpga simulate --checksum >/dev/null || fail "ssdkv lab fpga simulate fails"
  )
  python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    >"$("$trial/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm.pth"
  (cd "$trial" && timeout 600 bin/ssdkv doctor) >"$raw/doctor.log" ||
    { cat "$raw/doctor.log" >&2 && fail "ssdkv doctor found what does not work"; }
}

mkdir -p build dist
build_from_sdist
check_tag
repair
try_wheel
cp "$raw"/*.tar.gz "$wheel" dist/
say "dist/: $(basename "$raw"/*.tar.gz), $(basename "$wheel")"
