"""Files of results: written, read, and refused where they are not what they should be."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.fpga_offload.results import (
    Cells,
    Cycles,
    Results,
    add_results,
    read_cycles,
    read_synthesis,
    write_results,
)

ROW = Cycles("attend", 128, 1, "float16", 4096, 2 << 20, 33000)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cycles.json"
    written = Results("make fpga", {"verilator": "5.006"}, [ROW, ROW])
    write_results(written, path)
    assert read_cycles(path) == written
    cells = Results("synth", {}, [Cells("core", "xcup", 128, 1, 40000, 30000, 73, 1.5)])
    write_results(cells, path)
    assert read_synthesis(path) == cells


def test_runs_of_a_kernel_are_replaced_and_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "cycles.json"
    other = dataclasses.replace(ROW, group=4)
    longer = dataclasses.replace(ROW, tokens=8192)
    add_results(Results("first", {}, [longer, ROW, other]), path)
    assert read_cycles(path).rows == [ROW, longer, other]
    again = dataclasses.replace(ROW, cycles=40000)
    add_results(Results("second", {}, [again]), path)
    assert read_cycles(path) == Results("second", {}, [again, other])


def test_line_rate_is_a_beat_a_cycle() -> None:
    assert ROW.line_rate == pytest.approx((2 << 20) / 64 / 33000)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"tokens": "4096"}, "tokens: '4096'"),
        ({"cycles": -1}, "cycles: -1"),
        ({"heads": 3}, "heads"),
    ],
)
def test_another_form_is_refused(tmp_path: Path, row: dict[str, object], words: str) -> None:
    path = tmp_path / "cycles.json"
    write_results(Results("c", {}, [ROW]), path)
    document = json.loads(path.read_text())
    document["rows"][0] |= row
    path.write_text(json.dumps(document))
    with pytest.raises(BenchError, match=words) as caught:
        read_cycles(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_says_who_writes_it(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="README"):
        read_cycles(tmp_path / "none.json")
