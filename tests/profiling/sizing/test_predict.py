"""Constants from runs, predictions of others, and the table of both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.profiling.sizing.costs import EngineCosts, Misses
from vllm_ssdkv.profiling.sizing.forecast import hit_s, page_step
from vllm_ssdkv.profiling.sizing.predict import choice_of, fit, predict, rows_of, sizing_of
from vllm_ssdkv.profiling.sizing.runs import RUNS, read_runs
from vllm_ssdkv.profiling.sizing.validate import HERE, predictions, section, validation_table

Row = dict[str, Any]


def decode_row(selector: str, drives: int, context: int, batch: int, **other: Any) -> Row:  # noqa: ANN401
    slow = {"bandwidth": 2.5 * MIB, "iops": 400.0, "latency": 0.002, "dram_bytes": 16 * MIB}
    sizes = {"drives": drives, "selector": selector, "context": context, "batch": batch}
    return {**slow, **sizes, "longest": context + 128, "step_bytes": 1.0, **other}


def made(row: Row, costs: EngineCosts) -> Row:
    """The row as a machine would measure it that is what the model says."""
    (whole,) = rows_of([{"rows": [row]}])
    step = page_step(sizing_of(whole, costs), choice_of(whole)).seconds
    return {**row, "step_s": step, "tokens_per_s": row["batch"] / step}


def test_constants_are_found_again() -> None:
    truth = EngineCosts(0.02, 0.005)
    seen = [made(decode_row("exact", 3, 4096, batch), truth) for batch in (1, 2, 4)]
    rows = rows_of({"rows": [row]} for row in seen)
    (costs,) = fit(rows).values()
    assert (costs.step_s, costs.row_s) == pytest.approx((0.02, 0.005), rel=1e-3)
    other = rows_of([{"rows": [made(decode_row("exact", 1, 8192, 2), truth)]}])
    (found,) = predict(other, {"exact": costs})
    assert found.deviation == pytest.approx(0, abs=1e-3)
    assert (found.drives, found.setting) == (1, "page, exact, 2 x 8,192 tokens")


def test_missing_pages_are_a_law_of_context_and_room() -> None:
    truth = Misses(0.3, 0.5, -1.0)
    seen = [(c, r, truth.of(c, r)) for c, r in ((4096, 1.5), (8192, 2.0), (16384, 4.0))]
    found = Misses.fitted(seen)
    assert found.of(12288, 3.0) == pytest.approx(truth.of(12288, 3.0))
    assert found.of(8192, 0.0) == 1.0
    assert found.of(8192, 0.25) >= 0.75
    # More room never means more reads, whatever was seen.
    assert Misses.fitted([(c, r, 0.1 * r) for c, r, _ in seen]).by_room == 0.0


def test_hits_take_what_loading_takes_and_a_constant() -> None:
    slow = {"bandwidth": 4.0 * MIB, "latency": 0.02}
    rows = [{**slow, "drives": 3, "tokens": tokens} for tokens in (512, 4096, 8192)]
    loads = [hit_s(sizing_of(row, None, block=32), row["tokens"]) for row in rows]
    seen = [
        {**row, "ttft_ssd": load + 0.07, "ttft_computed": 1.0, "loaded_ssd": 1.0}
        for row, load in zip(rows, loads, strict=True)
    ]
    costs = fit(seen)
    assert costs["reuse"].hit_s == pytest.approx(0.07)
    # 13 bytes in 12 are KV: blocks of 32 tokens have a header of a page.
    assert loads[2] == pytest.approx(8192 * 1536 * 13 / 12 / (3 * 4 * MIB) + 0.02)
    assert [one.setting for one in predict(seen, costs)] == [
        "reuse, a hit of 4,096 tokens",
        "reuse, a hit of 8,192 tokens",
    ]


def runs(deviations: Sequence[float]) -> list[dict[str, Any]]:
    truth = EngineCosts(0.02)
    known = [made(decode_row("exact", 3, 4096, batch), truth) for batch in (1, 2)]
    found: list[dict[str, Any]] = [
        {"name": "c", "predicted": False, "load": 1.0, "rows": known},
    ]
    for deviation in deviations:
        row = made(decode_row("exact", 2, 4096, 1), truth)
        speed = row["tokens_per_s"] / (1 + deviation)
        rows = [{**row, "tokens_per_s": speed}]
        found.append({"name": "p", "predicted": True, "load": 3.0, "rows": rows})
    return found


def test_misses_are_bold(tmp_path: Path) -> None:
    found = predictions(runs([0.0, 0.19, 0.5, -0.3]))
    assert [one.miss for one in found] == [False, False, True, True]
    table = validation_table(found)
    assert table.note == "2 of 4 within 20%."
    assert table.rows[2][-1] == "**+50%**"
    assert table.rows[1][-1] == "+19%"
    file = tmp_path / "runs.jsonl"
    file.write_text("\n".join(map(json.dumps, runs([0.0, 0.5]))) + "\n")
    text = section(file)
    assert "| page, exact | 2 | 1 | +0% to +50% |" in text
    assert "1 of 2 within 20%. Missed: page, exact, 1 x 4,096 tokens, 2 drives: predicted" in text
    assert "1.0 to 3.0" in text
    assert "Not measured: exact, 1 drives" in " ".join(text.split())


def test_files_that_are_no_runs(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    assert read_runs(file) == []
    with pytest.raises(BenchError, match="no run that calibrates"):
        section(file)
    file.write_text("{")
    with pytest.raises(BenchError, match="a line is no JSON"):
        read_runs(file)


def test_what_is_predicted_calibrates_nothing() -> None:
    names = [run.name for run in RUNS]
    assert len(set(names)) == len(names)
    assert set(HERE) <= set(names)
    of = {run.name: run for run in RUNS}
    assert [of[name].predicted for name in HERE] == [False, False, True, True]
    assert {run.of.drives for run in RUNS if run.predicted} == {1, 2, 4}
    assert {run.of.drives for run in RUNS if not run.predicted} == {3}
