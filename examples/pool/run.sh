#!/bin/sh
# A pool on one machine: run.sh [DIRECTORY]
#
# Three nodes share the blocks of two engines, each block on two nodes. The first engine computes
# and stores; the second finds it all, although one node has been drained meanwhile.
set -eu

here=$(dirname "$0")
place=${1:-/tmp/ssdkv-pool}
mkdir -p "$place"
sed "s|/tmp/ssdkv-pool|$place|" "$here/pool.yaml" > "$place/pool.yaml"

trap 'ssdkv pool down "$place/pool.yaml"' EXIT
ssdkv pool up "$place/pool.yaml"
engine() {
  python "$here/../offline.py" --node "unix://$place/a/node.sock" \
    --node "unix://$place/b/node.sock" --node "unix://$place/c/node.sock"
}
engine
ssdkv pool drain "$place/pool.yaml" b
engine
