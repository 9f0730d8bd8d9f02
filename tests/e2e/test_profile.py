"""``ssdkv lab profile`` with a real engine: the traces are those of the model's attention."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.oracles import cluster_reads
from vllm_ssdkv.profiling.clusters.lab import Settings, activated_clusters
from vllm_ssdkv.profiling.clusters.trace import Manifest, Trace, part_problem, read_traces
from vllm_ssdkv.profiling.recall import recall
from vllm_ssdkv.profiling.simulation.papers import swarm, swarm_traces

pytestmark = pytest.mark.engine

_PROMPT, _STEPS, _TOKENS = 128, 32, 1280


def test_a_profile_of_the_demo_model(tmp_path: Path) -> None:
    place = tmp_path / "traces"
    command = [
        sys.executable,
        "-P",
        "-c",
        "from vllm_ssdkv.cli.main import main; main()",
        "lab",
        "profile",
    ]
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
    assert _found_needles(trace) >= 0.7
    _assert_rows_follow(trace)


def _assert_rows_follow(trace: Trace) -> None:
    """P11 of `ssdkv lab reproduce`, counted one by one on what the engine computed."""
    found = swarm_traces.measure([trace])
    heads = trace.adjacent_heads(8)
    counted = cluster_reads.totals(*activated_clusters(trace, heads, Settings()), drives=8)
    three = sum(counted[name] for name in ("static", "no balance", "no dedup")) / 3
    volume = (2 * counted["copies"] / counted["pages"] + 1) / 3
    assert found.schedule_gain == pytest.approx(three / counted["full"], rel=0.02)
    assert found.volume_gain == pytest.approx(volume)
    rows = {one.name: one.ours for one in swarm.results(found)}
    assert (rows["P11 time"], rows["P11 bytes"]) == (found.schedule_gain, found.volume_gain)


def _found_needles(trace: Trace) -> float:
    """Share of the questions in decode steps for which a head looks at the answer, far back.

    After ``? a b =`` the model's next word is the one behind ``a b =`` in the context.
    """
    turns = _PROMPT + _STEPS
    context, asked = recall.conversation("multikey", _TOKENS - turns, turns, seed=0)
    steps = [i for i in range(_PROMPT, turns) if asked[i] == recall.SYMBOLS["="]]
    found = []
    for step in steps:
        key = asked[step - 2 : step + 1]
        ends = [i for i in range(2, len(context)) if (context[i - 2 : i + 1] == key).all()]
        seen = [
            trace.weights(layer, head, np.array([step]))[0, ends[0] : ends[0] + 2].sum()
            for layer, head in trace.heads()
        ]
        found.append(max(seen) > 0.3)
    return float(np.mean(found))
