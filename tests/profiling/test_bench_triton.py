"""The GPU benchmark without a GPU: it says so and stops."""

import pytest
import torch

from vllm_ssdkv.profiling import bench_triton


def test_no_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        bench_triton.main([])
    assert ended.value.code == 2
    assert "no CUDA GPU" in capsys.readouterr().err


def test_a_difference_is_seen() -> None:
    bench_triton.expect("same", torch.ones(3), torch.ones(3).half(), 0.0)
    for wrong in (1.1, torch.nan, torch.inf):
        with pytest.raises(bench_triton.CheckError, match="kernel: differs"):
            bench_triton.expect("kernel", torch.tensor([1.0, wrong]), torch.ones(2), 1e-2)
