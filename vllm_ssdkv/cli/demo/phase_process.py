"""Runs a phase of ``ssdkv demo`` as a process of its own and reads its events."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from vllm_ssdkv.cli.demo.plan import DemoPlan, Phase
from vllm_ssdkv.profiling.recall.child_process import Event, environment, run_process


def run_phase(
    plan: DemoPlan, phase: Phase, log: Path, timeout_s: float, watch: Callable[[Event], None]
) -> Event:
    """Run the phase to its end and return its ``result`` event; ``watch`` sees every event.

    Raises:
        PhaseError: it failed or took longer than ``timeout_s``.
    """
    command = [sys.executable, "-P", "-m", "vllm_ssdkv.cli.demo.phase", plan.to_json(), phase]
    return run_process(command, environment(stock=phase == "stock"), log, timeout_s, watch)
