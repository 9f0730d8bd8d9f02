"""A measurement in a process of its own: vLLM's engine is built once in each.

A benchmark's module is started again with hidden options, and writes its rows into a file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import vllm_ssdkv
from vllm_ssdkv.base.errors import BenchError

MODEL = Path(vllm_ssdkv.__file__).parent / "demo_model"
"""A model that every installation has."""

PATIENCE_S = 900

Job = dict[str, Any]
Rows = list[dict[str, Any]]
Measurement = Callable[[Job], Rows]


def add_hidden_options(parser: argparse.ArgumentParser, names: Mapping[str, Measurement]) -> None:
    """Options by which a benchmark's own process is told what to measure."""
    parser.add_argument("--measure", choices=sorted(names), help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)


def measured(arguments: argparse.Namespace, names: Mapping[str, Measurement]) -> bool:
    """Do what the hidden options ask for; False when there are none.

    ``arguments.json`` is the file for the rows.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not arguments.measure:
        return False
    rows = names[arguments.measure](json.loads(arguments.job))
    Path(arguments.json).write_text(json.dumps(rows), encoding="utf-8")
    return True


def run_measurement(
    benchmark: str, name: str, job: Job, environment: Mapping[str, str] | None = None
) -> Rows:
    """Rows of one measurement of the module ``vllm_ssdkv.profiling.<benchmark>``. Blocks.

    Raises:
        BenchError: it failed, with the end of what it printed; or took longer than
            :data:`PATIENCE_S`.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [sys.executable, "-P", "-m", f"vllm_ssdkv.profiling.{benchmark}"]
        command += ["--measure", name, "--job", json.dumps(job), "--json", out.name]
        try:
            done = subprocess.run(
                command,
                check=False,
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                env={**os.environ, **(environment or {})},
            )
        except subprocess.TimeoutExpired:
            raise BenchError(f"{benchmark}: {name} did not end in {PATIENCE_S} s") from None
        if done.returncode:
            raise BenchError(f"{benchmark}: {name} failed:\n{done.stderr[-4000:]}")
        rows: Rows = json.loads(Path(out.name).read_text(encoding="utf-8"))
        return rows
