"""The checks that run on GPUs, in the interpreter: they pass, and they find wrong kernels."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from vllm_ssdkv.profiling.attention_problem import RowShape
from vllm_ssdkv.profiling.ragged_checks import (
    check_anywhere,
    check_digest,
    check_ordered_packing,
    check_packing,
    check_ragged,
)
from vllm_ssdkv.profiling.ragged_problem import RowSize
from vllm_ssdkv.profiling.triton_checks import CheckError, Model, check_attention
from vllm_ssdkv.triton_kernels import (
    attend,
    choose,
    codes,
    digest,
    order,
    pack,
    score,
    summarize,
    tokens,
)

CPU = torch.device("cpu")
MODEL = Model(1, 2, 16, 16, torch.bfloat16)
ROWS = (RowSize(2, 5), RowSize(0, 1), RowSize(1, 20))
SHAPES = (RowShape(1, 50, 0, 51), RowShape(9, 20, 0, 29), RowShape(2, 9, 0, 0))


def ragged() -> None:
    check_ragged(CPU, MODEL, pinned=True, rows=ROWS)


def anywhere() -> None:
    check_anywhere(CPU, MODEL, pinned=True)


def packing() -> None:
    check_packing(CPU, MODEL)


def ordered_packing() -> None:
    check_ordered_packing(CPU, MODEL)


def test_right_kernels_pass() -> None:
    check_attention(CPU, MODEL, SHAPES)
    ragged()
    anywhere()
    packing()
    ordered_packing()
    check_digest(CPU)


@pytest.mark.parametrize(
    ("check", "module", "name", "told"),
    [
        (ragged, summarize, "summarize", "summarize, bounds"),
        (ragged, score, "channel_logits", "logits of channels"),
        (ragged, tokens, "score_tokens", "scores of channels"),
        (ragged, tokens, "cover", "cover of channels"),
        (ragged, score, "page_logits", "bounds and weights"),
        (ragged, codes, "code_logits", "logits of codes"),
        (ragged, choose, "weigh", "bounds and weights"),
        (ragged, choose, "choose", "choose, p"),
        (ragged, attend, "attend_pages", "attend_pages"),
        (anywhere, attend, "attend", "attend, window"),
        (packing, pack, "copy_pages", "pack_summarized, bounds"),
        (packing, summarize, "summarize", "pack_summarized, bounds"),
        (ordered_packing, order, "reorder", "keeps its order was ordered"),
        (lambda: check_digest(CPU), digest, "digest", "digest: the kernel"),
        (lambda: check_digest(CPU), digest, "read_words", "read_words"),
    ],
)
def test_a_wrong_kernel_is_found(
    monkeypatch: pytest.MonkeyPatch,
    check: Callable[[], None],
    module: ModuleType,
    name: str,
    told: str,
) -> None:
    """Each is made to leave out its work, or to be a little wrong."""
    right = getattr(module, name)

    def wrong(*given: object, **named: object) -> object:
        if "scale" in named:
            named["scale"] = float(str(named["scale"])) * 1.5
            return right(*given, **named)
        result = right(*given, **named)
        if isinstance(result, tuple):
            return tuple(part + 1 for part in result)
        return result + 1 if isinstance(result, torch.Tensor) else None

    def nothing(*_given: object, **_named: object) -> None:
        return None

    monkeypatch.setattr(module, name, nothing if module in (summarize, pack) else wrong)
    with pytest.raises(CheckError, match=told):
        check()
