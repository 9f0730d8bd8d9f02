#!/usr/bin/env bash
# Brings the tools of fpga_offload/rtl into build/fpga and builds the simulated kernels there: one shared
# library per shape, HEAD_SIZE:GROUP or HEAD_SIZE:GROUP:sparf, those of the tests if none is named. Does nothing when nothing changed.
#
# Needs Linux with Python 3.11 or newer (venv module), a C++20 compiler, make, Verilator 5 and Icarus
# Verilog; what is missing is named. Root has it installed with apt-get, after a line that says so.
# SSDKV_APT=1 does the same for another user, through sudo; SSDKV_APT=0 keeps root from it.
set -euo pipefail
cd "$(dirname "$0")/.."

script=fpga
. scripts/apt.sh

lock=requirements/fpga.lock
folder=build/fpga
venv=$folder/venv
bundle=$folder/zkf.v
shapes=("$@")
[ "${#shapes[@]}" -gt 0 ] || shapes=(128:1 128:4 64:2:sparf)

missing_packages() {
  command -v verilator >/dev/null || echo verilator
  command -v iverilog >/dev/null || echo iverilog
  command -v make >/dev/null || echo make
  command -v "${CXX:-c++}" >/dev/null || echo g++
  [ -e /usr/include/xrt/xrt_device.h ] || [ -e /usr/include/xrt/xrt/xrt_device.h ] || echo libxrt-dev
  [ -e /usr/include/uuid/uuid.h ] || echo uuid-dev
}

check_machine() {
  local packages
  read -r -a packages <<<"$(missing_packages | tr '\n' ' ')"
  [ "${#packages[@]}" -eq 0 ] || install_packages "${packages[@]}" ||
    fail "the FPGA's simulators need these; please install (Debian and Ubuntu names):" \
      "${packages[*]}; as root, or with SSDKV_APT=1, this script does that with apt-get"
}

# Yosys and the operators of the RTL, in an environment that nothing else uses.
install_lock() {
  local hash
  hash=$(sha256sum "$lock" | cut -d ' ' -f 1)
  [ "$(cat "$venv/.locked" 2>/dev/null)" != "$hash" ] || return 0
  say "new environment in $venv"
  "${PYTHON:-python3}" -m venv --clear "$venv"
  "$venv/bin/pip" install -qq --disable-pip-version-check --no-deps -r "$lock"
  "$venv/bin/python" -c 'import sys, zkf; open(sys.argv[1], "w").write(zkf.get_rtl_bundle())' "$bundle"
  echo "$hash" >"$venv/.locked"
}

# Of both kernels, and what `sparf` has beside them.
parts=(float softmax attention_core row_filter page_reader checksum digest_writer record_writer memory_errors
  control_registers list_reader attend)
sparf_parts=(argtopk channel_choice channel_scores token_mass mean_mix sparf)

sources() {
  echo fpga_offload/generated/ssdkv_fpga.svh "$bundle"
  printf 'fpga_offload/rtl/%s.sv\n' "$@"
}

# A library is a function of these.
source_hash() {
  {
    verilator --version
    # shellcheck disable=SC2046
    cat $(sources "$@") fpga_offload/rtl/capi.cpp fpga_offload/generated/ssdkv_fpga.h
    declare -f build_kernel build_model
  } | sha256sum | cut -d ' ' -f 1
}

# Slow paths run once, so they are not optimised.
build_kernel() {
  local kernel=$1 head_size=$2 group=$3 name=$4 flags=$5
  shift 5
  # shellcheck disable=SC2046
  verilator --cc --build -j 2 -O3 --x-assign fast --noassert -Wno-fatal -Wno-lint \
    --prefix "V${kernel}_$name" "-GD=$head_size" "-GG=$group" --top-module "$kernel" \
    -Mdir "$folder/$name/$kernel" $(sources "${parts[@]}" "${sparf_parts[@]}") "$@" \
    -MAKEFLAGS "OPT_FAST=-O2 OPT_SLOW=-O0 OPT_GLOBAL=-O2" -CFLAGS "-std=c++20 -fPIC $flags"
}

build_model() {
  local head_size=$1 group=$2 name=$3 sparf=$4 root=$PWD flags archives=()
  flags="-I$root/fpga_offload/generated -DSSDKV_HEAD_SIZE=$head_size -DSSDKV_GROUP=$group"
  flags+=" -DSSDKV_ATTEND=Vattend_$name"
  if [ -n "$sparf" ]; then
    build_kernel sparf "$head_size" "$group" "$name" ""
    flags+=" -DSSDKV_SPARF=Vsparf_$name -I$root/$folder/$name/sparf"
    archives=(-LDFLAGS "$root/$folder/$name/sparf/Vsparf_${name}__ALL.a")
  fi
  build_kernel attend "$head_size" "$group" "$name" "$flags" --exe \
    "$root/fpga_offload/rtl/capi.cpp" -o "$root/$folder/new-$name.so" -LDFLAGS -shared "${archives[@]}"
}

build_shape() {
  local head_size group sparf hash name stamp used=("${parts[@]}")
  [[ "$1" =~ ^(64|128|256):(1|2|4|5|8)(:sparf)?$ ]] ||
    fail "$1: no such shape; head size 64, 128 or 256, a colon, a group of 1, 2, 4, 5 or 8, and :sparf" \
      "to have that kernel as well"
  head_size=${BASH_REMATCH[1]} group=${BASH_REMATCH[2]} sparf=${BASH_REMATCH[3]}
  [ -z "$sparf" ] || used+=("${sparf_parts[@]}")
  name=rtlsim_d${head_size}_g${group}
  stamp=$folder/$name.built
  hash=$(source_hash "${used[@]}")
  if [ -e "$folder/$name.so" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$hash" ]; then return; fi
  say "building $folder/$name.so (a minute or two)"
  rm -rf "$stamp" "${folder:?}/$name"
  mkdir -p "$folder/$name"
  build_model "$head_size" "$group" "$name" "$sparf" >"$folder/$name.log" 2>&1 ||
    fail "the build failed; see $folder/$name.log"
  mv "$folder/new-$name.so" "$folder/$name.so"
  rm -rf "${folder:?}/$name"
  echo "$hash" >"$stamp"
}

# The host of a card: XRT's C++ API for ctypes.
build_bridge() {
  local source=fpga_offload/xrt/bridge.cpp name=libssdkv_xrt.so hash
  hash=$({ cat "$source" && declare -f build_bridge; } | sha256sum | cut -d ' ' -f 1)
  if [ -e "$folder/$name" ] && [ "$(cat "$folder/$name.built" 2>/dev/null)" = "$hash" ]; then return; fi
  say "building $folder/$name"
  "${CXX:-c++}" -std=c++20 -O2 -fPIC -shared -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror \
    -isystem /usr/include/xrt "$source" -o "$folder/$name" -lxrt_coreutil -luuid -pthread
  echo "$hash" >"$folder/$name.built"
}

[ "$(uname -s)" = Linux ] || fail "runs on Linux only"
check_machine
mkdir -p "$folder"
install_lock
build_bridge
for shape in "${shapes[@]}"; do build_shape "$shape"; done
say "$folder is up to date"
