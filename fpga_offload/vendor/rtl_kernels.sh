#!/usr/bin/env bash
# The RTL kernels as an xclbin for the SmartSSD. Written to the documented interface, never run.
#
#   HEAD_SIZE=128 GROUP=4 fpga_offload/vendor/rtl_kernels.sh build/fpga/rtl
#
# Needs build/fpga/zkf.v, the floating-point operators, which `make fpga` puts there.
set -euo pipefail

out=${1:?usage: rtl_kernels.sh OUTPUT_FOLDER}
target=${TARGET:-hw}
platform=${PLATFORM:-xilinx_u2_gen3x4_xdma_gc_2_202110_1}
memory=${MEMORY:-bank0} # as platforminfo lists it
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
zkf=${ZKF:-$here/../build/fpga/zkf.v}

for tool in vivado v++; do
  command -v "$tool" >/dev/null || {
    echo "$tool is not in PATH: source settings64.sh of Vitis" >&2
    exit 1
  }
done
[ -e "$zkf" ] || {
  echo "$zkf is not there: run make fpga" >&2
  exit 1
}
mkdir -p "$out"
sed "s/:bank0$/:$memory/" "$here/generated/connectivity.cfg" >"$out/connectivity.cfg"

objects=()
for kernel in attend sparf; do
  vivado -mode batch -log "$out/$kernel.log" -journal "$out/$kernel.jou" \
    -source "$here/vendor/package_kernel.tcl" \
    -tclargs "$here" "$zkf" "$out" "$kernel" "${HEAD_SIZE:-128}" "${GROUP:-1}"
  objects+=("$out/$kernel.xo")
done

v++ --link --target "$target" --platform "$platform" --config "$out/connectivity.cfg" \
  --kernel_frequency "${FREQUENCY:-296}" --temp_dir "$out/link" --report_level 1 \
  --output "$out/ssdkv.xclbin" "${objects[@]}"
echo "wrote $out/ssdkv.xclbin"
