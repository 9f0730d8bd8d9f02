"""Runs a phase of ``ssdkv demo`` as a process of its own and reads its events."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vllm_ssdkv.cli.demo.plan import DemoPlan, Phase
from vllm_ssdkv.profiling.rig.child_process import Event, environment, run_module


def run_phase(
    plan: DemoPlan, phase: Phase, log: Path, timeout_s: float, watch: Callable[[Event], None]
) -> Event:
    """Run the phase to its end and return its ``result`` event; ``watch`` sees every event.

    Raises:
        PhaseError: it failed or took longer than ``timeout_s``.
    """
    given, variables = [plan.to_json(), phase], environment(stock=phase == "stock")
    return run_module("vllm_ssdkv.cli.demo.phase", given, log, timeout_s, watch, variables)
