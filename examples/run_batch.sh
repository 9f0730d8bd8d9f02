#!/bin/sh
# A batch in OpenAI's format: run_batch.sh [RESULTS.jsonl [more options of vllm run-batch]]
#
# The four requests of batch.jsonl share a document: it is computed once, and in later runs not at all.
set -eu

results=${1:-results.jsonl}
[ $# -eq 0 ] || shift
exec vllm run-batch \
  -i "$(dirname "$0")/batch.jsonl" -o "$results" \
  --model "${MODEL:-$(ssdkv demo-model)}" --served-model-name demo \
  --kv-transfer-config.kv_connector SSDKVConnector \
  --kv-transfer-config.kv_role kv_both \
  "$@"
