"""The GPU benchmark without a GPU: it says so and stops. Where there is one, it says which."""

import json
from pathlib import Path

import pytest
import torch

from vllm_ssdkv.profiling import bench_triton, triton_checks


def test_no_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        bench_triton.main([])
    assert ended.value.code == 2
    assert "no CUDA GPU" in capsys.readouterr().err


def test_figures_name_date_and_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Printed and in the file; what is measured is tested in the interpreter."""
    figure = bench_triton.Figure("device copy", 3 * 10**9, 2.0, 1.0)
    for name, value in (
        ("is_available", lambda: True),
        ("current_device", lambda: 0),
        ("get_device_name", lambda _device: "Some GPU"),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(bench_triton, "measure", lambda *_arguments: [figure])
    file = tmp_path / "figures.json"
    bench_triton.main(["--json", str(file)])
    held = json.loads(file.read_text())
    assert held["device"] == "Some GPU"
    assert held["figures"] == [
        {
            **{"name": "device copy", "bytes_moved": 3 * 10**9, "seconds": 2.0},
            **{"copy_share": 1.0, "in_graph": False},
        }
    ]
    printed = capsys.readouterr().out
    for part in (f"date {held['date']}", "device Some GPU", f"torch {torch.__version__}", "1.5"):
        assert part in printed


def test_a_difference_is_seen() -> None:
    triton_checks.expect("same", torch.ones(3), torch.ones(3).half(), 0.0)
    for wrong in (1.1, torch.nan, torch.inf):
        with pytest.raises(triton_checks.CheckError, match="kernel: differs"):
            triton_checks.expect("kernel", torch.tensor([1.0, wrong]), torch.ones(2), 1e-2)
