"""``ssdkv profile`` with a real engine: the traces are those of the model's attention."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vllm_ssdkv.profiling.clusters.trace import Manifest, part_problem, read_traces
from vllm_ssdkv.profiling.recall import recall

pytestmark = pytest.mark.engine

_PROMPT, _STEPS, _TOKENS = 128, 32, 1280


def test_a_profile_of_the_demo_model(tmp_path: Path) -> None:
    place = tmp_path / "traces"
    command = [sys.executable, "-c", "from vllm_ssdkv.cli.main import main; main()", "profile"]
    numbers = {"--prompt": _PROMPT, "--steps": _STEPS, "--tokens": _TOKENS}
    options = [word for name, number in numbers.items() for word in (name, str(number))]
    subprocess.run(
        [*command, str(place), "--document", "multikey", *options], check=True, timeout=240
    )
    assert sorted(path.name for path in place.iterdir()) == ["manifest.json", "multikey.npz"]
    manifest, (trace,) = read_traces(place)
    assert not any(part_problem(place, part) for part in manifest.parts.values())
    assert Manifest.read(place) == manifest
    assert trace.query.shape == (3, 4, _PROMPT + _STEPS, recall.HEAD_SIZE)
    assert trace.key.shape == (3, 2, _TOKENS, recall.HEAD_SIZE)
    # Every query and key was computed: none is as the arrays began.
    assert (np.abs(trace.query).max(-1) > 0).all()
    assert (np.abs(trace.key).max(-1) > 0).all()
    _finds_needles(trace.decode_steps[0], trace)


def _finds_needles(first: int, trace: object) -> None:
    """Decode steps that answer questions attend to what they were asked for, far back."""
    from vllm_ssdkv.profiling.clusters.trace import Trace

    assert isinstance(trace, Trace)
    context, asked = recall.conversation("multikey", _TOKENS - _PROMPT - _STEPS, _PROMPT + _STEPS, 0)
    # After "? a b =" the answer's words follow "a b =" in the context, each found by the one before.
    answers = [i for i in range(first, len(asked) - 1) if asked[i] == recall.SYMBOLS["="]]
    found = 0
    for step in answers:
        key = asked[step - 2 : step + 1]
        place = next(
            i for i in range(2, len(context)) if (context[i - 2 : i + 1] == key).all()
        )
        best = max(
            float(trace.weights(layer, head, np.array([step]))[0, place : place + 2].sum())
            for layer, head in trace.heads()
        )
        found += best > 0.3
    assert answers
    assert found >= 0.7 * len(answers)
