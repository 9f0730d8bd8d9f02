#!/bin/sh
# A batch in OpenAI's format: run_batch.sh [RESULTS.jsonl [options of vLLM]]
#
# The four requests of batch.jsonl share a document: it is computed once, and in later runs not at all.
# `vllm run-batch -i ... -o ...` takes the same files and options.
set -eu

results=${1:-results.jsonl}
[ $# -eq 0 ] || shift
exec ssdkv batch run "$(dirname "$0")/batch.jsonl" "$results" \
  --model "${MODEL:-$(ssdkv lab demo-model)}" --served-model-name demo \
  --kv-transfer-config.kv_connector SSDKVConnector \
  --kv-transfer-config.kv_role kv_both \
  "$@"
