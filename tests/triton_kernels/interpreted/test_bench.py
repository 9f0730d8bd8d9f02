"""The GPU benchmark's checks and figures in the interpreter, where times do not count."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from vllm_ssdkv.profiling import bench_triton
from vllm_ssdkv.profiling.triton_checks import check_sparse
from vllm_ssdkv.triton_kernels import attend, choose, summarize, tokens

CPU = torch.device("cpu")
MODEL = bench_triton.Model(1, 2, 16, 16, torch.bfloat16)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Replaces timing by one run per measurement that counts as a second."""
    ran: list[Callable[[], object]] = []

    def once(work: Callable[[], object]) -> float:
        work()
        ran.append(work)
        return 1.0

    monkeypatch.setattr(bench_triton, "seconds_of", once)
    return ran


def test_checks_then_measures(runs: list[Callable[[], object]]) -> None:
    figures = bench_triton.measure(CPU, MODEL, [64, 128], [1, 2], 1, 1024)
    names = [figure.name for figure in figures]
    assert names[0] == "device copy"
    assert sum(name.startswith("decode") for name in names) == 4
    # For each context and batch decode and the eight kernels of sparse decode; the copy; two packs.
    assert len(runs) == len(figures) == 4 * 9 + 3
    assert all(figure.bytes_moved > 0 for figure in figures)
    cache = 2 * 128 * 2 * 1 * 16 * 2
    queries = 2 * (2 * 2 * 16 * 2)
    (largest,) = (f for f in figures if f.name == "decode, context 128, batch 2")
    assert largest.bytes_moved == cache + queries
    assert largest.copy_share == pytest.approx((cache + queries) / 2048)


def test_a_wrong_kernel_is_not_measured(
    runs: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attend, "_splits", lambda *arguments: 1)
    right = attend.attend

    def wrong(*arguments: object, scale: float, **rest: object) -> None:
        right(*arguments, scale=scale * 1.1, **rest)

    monkeypatch.setattr(attend, "attend", wrong)
    with pytest.raises(bench_triton.CheckError, match="attend and finish"):
        bench_triton.measure(CPU, MODEL, [64], [1], 1, 1024)
    assert runs == []


@pytest.mark.parametrize(
    ("module", "name", "kernel"),
    [
        (summarize, "summarize", "summarize, bounds"),
        (tokens, "score_tokens", "scores by tokens of 1"),
        (tokens, "cover", "cover"),
        (attend, "attend_pages", "attend_pages in its own memory"),
        (choose, "weigh", "bounds and weights"),
    ],
)
def test_a_wrong_sparse_kernel_is_found(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, kernel: str
) -> None:
    """One that does nothing, or answers with ones."""
    right = getattr(module, name)

    def wrong(*arguments: object, **rest: object) -> object:
        answer = None if name in {"summarize", "attend_pages"} else right(*arguments, **rest)
        if isinstance(answer, tuple):
            return tuple(torch.ones_like(part) for part in answer)
        return answer if answer is None else torch.ones_like(answer)

    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(bench_triton.CheckError, match=kernel):
        check_sparse(CPU, MODEL)
