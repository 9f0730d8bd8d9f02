"""Process of :func:`~vllm_ssdkv.profiling.rig.child_process.run_measurement`."""

from __future__ import annotations

import importlib
import json

from vllm_ssdkv.profiling.rig.child_process import Tell, serve


def _measure(module: str, name: str, job: str, tell: Tell) -> None:
    tell("result", rows=getattr(importlib.import_module(module), name)(json.loads(job)))


if __name__ == "__main__":
    serve(_measure)
