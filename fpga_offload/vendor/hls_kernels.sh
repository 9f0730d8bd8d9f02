#!/usr/bin/env bash
# The HLS kernels as an xclbin for the SmartSSD. Written to the documented interface, never run.
#
#   HEAD_SIZE=128 GROUP=4 DTYPE=float16 fpga_offload/vendor/hls_kernels.sh build/fpga/hls
#
# TARGET is hw, or hw_emu for the vendor's simulation. FREQUENCY is what is asked for, in MHz; what is
# reached is in the link's report.
set -euo pipefail

out=${1:?usage: hls_kernels.sh OUTPUT_FOLDER}
target=${TARGET:-hw}
platform=${PLATFORM:-xilinx_u2_gen3x4_xdma_gc_2_202110_1}
memory=${MEMORY:-bank0} # as platforminfo lists it
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

command -v v++ >/dev/null || {
  echo "v++ is not in PATH: source settings64.sh of Vitis" >&2
  exit 1
}
mkdir -p "$out"
sed "s/:bank0$/:$memory/" "$here/generated/connectivity.cfg" >"$out/connectivity.cfg"

objects=()
for kernel in attend sparf; do
  v++ --compile --target "$target" --platform "$platform" --kernel "$kernel" \
    --kernel_frequency "${FREQUENCY:-296}" --temp_dir "$out/$kernel" \
    --define "SSDKV_HEAD_SIZE=${HEAD_SIZE:-128}" --define "SSDKV_GROUP=${GROUP:-4}" \
    --define "SSDKV_BFLOAT16=$([[ ${DTYPE:-float16} == bfloat16 ]] && echo 1 || echo 0)" \
    --include "$here/hls" --include "$here/generated" \
    --output "$out/$kernel.xo" "$here/hls/$kernel.cpp"
  objects+=("$out/$kernel.xo")
done

v++ --link --target "$target" --platform "$platform" --config "$out/connectivity.cfg" \
  --kernel_frequency "${FREQUENCY:-296}" --temp_dir "$out/link" --report_level 1 \
  --output "$out/ssdkv.xclbin" "${objects[@]}"
echo "wrote $out/ssdkv.xclbin"
