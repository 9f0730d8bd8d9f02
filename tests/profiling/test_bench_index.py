"""The benchmark of the index, small: what it reports is true of any size."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from vllm_ssdkv.profiling import bench_index

SLOTS = 4000


def test_it_measures_what_the_page_on_sizing_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    options = ["--slots", str(SLOTS), "--dir", str(tmp_path), "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench_index", *options])
    bench_index.main()
    figures = json.loads(out.read_text())
    assert figures["table_bytes_per_slot"] == pytest.approx(76, abs=1)
    assert figures["journal_bytes"] == 128 + 72 * SLOTS  # killed: nothing was rewritten
    assert 200 < figures["appends_per_write"] <= bench_index.BATCH
    assert figures["largest_journal_share_of_bound"] <= 1
    assert "| recovery_s |" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [out]
