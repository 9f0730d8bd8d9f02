"""The rig of benchmarks: measurements in another process, turns, ratios and their ranges."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.rig import child_process
from vllm_ssdkv.profiling.rig.child_process import Job, Rows, run_measurement
from vllm_ssdkv.profiling.rig.engine import MODEL
from vllm_ssdkv.profiling.rig.measure import by_turns, markdown, median_range


def _function(
    text: str, name: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Job], Rows]:
    """A function of a module that a child process can import, too."""
    (directory / "measured_here.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(directory))
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.delitem(sys.modules, "measured_here", raising=False)
    found: Callable[[Job], Rows] = getattr(importlib.import_module("measured_here"), name)
    return found


def test_rows_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import os\ndef twice(job):\n    return [{'n': 2 * job['value'], 'pid': os.getpid()}]"
    twice = _function(text, "twice", tmp_path, monkeypatch)
    (row,) = run_measurement(twice, {"value": 21})
    assert row["n"] == 42
    assert row["pid"] != os.getpid()


def test_a_failure_says_which_measurement_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def broken(job):\n    raise OSError('the cause')"
    broken = _function(text, "broken", tmp_path, monkeypatch)
    with pytest.raises(BenchError, match=r"(?s)measured_here: broken failed.*the cause"):
        run_measurement(broken, {})


def fill(job: Job) -> Rows:
    raise AssertionError(job)


def test_a_measurement_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "PATIENCE_S", 0.0)
    with pytest.raises(BenchError, match="test_rig: fill did not end within 0 s"):
        run_measurement(fill, {})


def test_the_model_is_that_of_the_package() -> None:
    assert (MODEL / "config.json").is_file()


@pytest.mark.parametrize(("rotate", "second"), [(False, "abc"), (True, "bca")])
def test_calls_take_turns(rotate: bool, second: str) -> None:
    seen: list[str] = []

    def call(name: str) -> int:
        seen.append(name)
        return len(seen)

    calls = {name: functools.partial(call, name) for name in "abc"}
    found = by_turns(calls, 2, warm_up=3, rotate=rotate)
    assert "".join(seen[9:]) == f"abc{second}"
    assert sorted(n for numbers in found.values() for n in numbers) == list(range(10, 16))
    assert list(found) == ["a", "b", "c"]


def test_the_range_of_a_median_covers_it() -> None:
    values = [float(n) for n in range(100)]
    low, high = median_range(values[::-1])
    assert (low, high) == (40.0, 59.0)
    assert median_range([3.0]) == (3.0, 3.0)


def test_a_table_has_a_line_below_its_head() -> None:
    assert markdown(("a", "b"), [("1", "2")]) == "| a | b |\n|---|---|\n| 1 | 2 |"
