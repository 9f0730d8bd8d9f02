"""``ssdkv lab profile`` with no engine: what it refuses, and that it resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.profiling.clusters.synthetic import trace
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.profiling.clusters import recording
from vllm_ssdkv.profiling.clusters.plan import RecordPlan
from vllm_ssdkv.profiling.clusters.trace import Manifest
from vllm_ssdkv.profiling.recall.recall import MODEL_DIR
from vllm_ssdkv.profiling.rig.child_process import PhaseError


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[RecordPlan]:
    """Plans of the engines that would have run; each makes its first document only."""
    seen: list[RecordPlan] = []

    def run(module: str, given: list[str], *_: Any) -> dict[str, Any]:  # noqa: ANN401 - of run_module
        plan = RecordPlan.from_json(given[0])
        seen.append(plan)
        directory = Path(plan.directory)
        manifest = Manifest.read(directory) or Manifest(plan.settings())
        name = plan.documents[0].name
        manifest.parts[name] = trace(name).write(directory)
        manifest.write(directory)
        if len(plan.documents) > 1:
            raise PhaseError("failed with signal 2")
        return {"event": "result"}

    monkeypatch.setattr(recording, "run_module", run)
    monkeypatch.setattr(recording, "tail", lambda log: "the log's end")
    return seen


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["lab", "profile", *arguments])


def test_an_interrupted_recording_goes_on(tmp_path: Path, plans: list[RecordPlan]) -> None:
    place = tmp_path / "traces"
    options = [str(place), "--document", "chain", "--document", "copy", "--tokens", "4096"]
    stopped = run(*options)
    assert stopped.exit_code == 1
    assert "failed with signal 2" in stopped.output
    plot = tmp_path / "plot.png"
    result = run(*options, "--json", "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert [[one.name for one in plan.documents] for plan in plans] == [["chain", "copy"], ["copy"]]
    assert json.loads(result.stdout)["tables"][0]["columns"] == ["found by", "chain", "copy"]
    assert plot.stat().st_size > 10_000
    found = Manifest.read(place)
    assert found is not None
    assert found.settings["model"] == MODEL_DIR.name
    assert Path(plans[0].model) == MODEL_DIR
    assert run(*options).exit_code == 0
    assert len(plans) == 2
    assert not list(place.glob(".ssdkv-profile-*"))
    other = run(*options, "--steps", "128")
    assert other.exit_code == 1
    assert "has traces with steps 256, not 128" in other.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--document", "nothing.txt"], ["--document nothing.txt", "multikey"]),
        (["--document", "chain", "--document", "chain"], ["two are named chain"]),
        (["--model", str(MODEL_DIR)], ["--document: name a text file"]),
        (["--model", str(MODEL_DIR), "--document", "chain"], ["a task of the demo's model"]),
        (["--model", "."], ["config.json"]),
        (["--max-size", "1MiB"], ["--max-size 1 MiB", "--layers"]),
        (["--tokens", "70000"], ["at most 65535"]),
        (["--tokens", "2048"], ["at least 2304"]),
        (["--plot", "plot.txt"], [".png, .svg, .pdf"]),
    ],
)
def test_wrong_options_are_named(
    tmp_path: Path, plans: list[RecordPlan], options: list[str], words: list[str]
) -> None:
    result = run(str(tmp_path / "traces"), *options)
    assert result.exit_code in (1, 2)
    assert all(word in result.output for word in words), result.output
    assert not plans
