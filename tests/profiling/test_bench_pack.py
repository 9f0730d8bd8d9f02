"""The benchmark of packing, small: every way is measured, as a multiple of packing pages alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from vllm_ssdkv import _kernels
from vllm_ssdkv.profiling import bench_pack


def test_every_way_of_packing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setitem(bench_pack.SHAPES, "small", bench_pack.Shape(1, 1, 1, 8, 16, 8))
    out = tmp_path / "figures.json"
    try:
        bench_pack.main(["--shapes", "small", "--repeat", "2", "--json", str(out)])
    finally:
        torch.set_num_threads(threads)
    figures = json.loads(out.read_text())["small"]
    kinds = ["bounds", "spread", "channels"]
    parts = ("", ": keys", ": tails")
    assert list(figures) == ["exact", *(kind + what for kind in kinds for what in parts)]
    assert min(figures.values()) > 0
    printed = capsys.readouterr().out
    assert _kernels.isa() in printed
    assert " 1.00 of exact" in printed
