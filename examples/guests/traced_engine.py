"""An I/O engine of your own: threads, with a line in a file for each batch.

PYTHONPATH=examples/guests SSDKV_TRACE=/tmp/trace.csv vllm serve MODEL --kv-transfer-config '{
  "kv_connector": "SSDKVConnector", "kv_role": "kv_both",
  "kv_connector_extra_config": {"io": {"engine": "traced_engine:TracedEngine"}}}'
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from vllm_ssdkv.store.io.engines.protocol import U16, U32, U64, Batch, Op
from vllm_ssdkv.store.io.engines.threads import ThreadsEngine
from vllm_ssdkv.store.memory.arena import Arena

MAX_LINES = 1_000_000
"""Lines that an engine writes at most."""


class TracedEngine(ThreadsEngine):
    """Writes time, direction, requests and bytes of each batch. See ``protocol.IoEngine``."""

    name = "traced"

    def __init__(self, fds: Sequence[int], arena: Arena, queue_depth: int) -> None:
        super().__init__(fds, arena, queue_depth)
        path = Path(os.environ.get("SSDKV_TRACE", "ssdkv-trace.csv"))
        self._trace = path.open("a", buffering=1)
        self._left = MAX_LINES

    def submit(self, op: Op, device: U16, offset: U64, length: U32, buffer: U64) -> Batch:
        """See the protocol."""
        batch = super().submit(op, device, offset, length, buffer)
        if self._left > 0:
            self._left -= 1
            what = Op(op).name.lower()
            self._trace.write(f"{time.time():.6f},{what},{len(length)},{int(length.sum())}\n")
        return batch

    def close(self, timeout_s: float) -> bool:
        """See the protocol."""
        self._left = 0
        self._trace.close()
        return super().close(timeout_s)
