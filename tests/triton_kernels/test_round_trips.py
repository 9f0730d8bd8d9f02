"""From queries to attention over the chosen pages, nothing is read back to the host.

Tensors of PyTorch's ``meta`` device have sizes and no data: whoever asks for a value gets an error,
as would a copy that a GPU's host has to wait for.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
import torch

from tests.triton_kernels.test_compile import Recorder, record
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, PartialState
from vllm_ssdkv.kernels.operands.page_list import PageList
from vllm_ssdkv.triton_kernels import attend, choose, codes, finish, merge, score, tokens

__all__ = ["record"]

META = torch.device("meta")
LAYOUT = BlockLayout.unpadded(64, 16, 2, 128, torch.bfloat16)
ROWS, HEADS, PAGES = 3, 8, 256


def rows(dtype: torch.dtype = torch.int32, count: int = ROWS) -> torch.Tensor:
    return torch.empty(count, dtype=dtype, device=META)


@pytest.fixture
def launches(
    record: Callable[[ModuleType, str], Recorder], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Recorder]:
    """Every kernel of a sparse decode step replaced by a recorder."""
    # How many programs a device runs at once is known on the host.
    monkeypatch.setattr(attend, "processors", lambda _device: 132)
    return {
        name: record(module, name)
        for module, names in (
            (score, ("_pages_kernel", "_channels_kernel")),
            (codes, ("_rotate_kernel", "_logits_kernel")),
            (tokens, ("_sum_kernel", "_score_kernel", "_cover_kernel")),
            (choose, ("_weigh_kernel", "_choose_kernel")),
            (attend, ("_attend_kernel",)),
            (merge, ("_merge_kernel",)),
            (finish, ("_finish_kernel",)),
        )
        for name in names
    }


@pytest.mark.parametrize("scorer", ["bounds", "spread", "codes", "channels"])
@pytest.mark.parametrize("p", [1.0, 0.9])
def test_nothing_is_read_back(launches: dict[str, Recorder], scorer: str, p: float) -> None:
    query = torch.empty((ROWS, HEADS, 128), dtype=torch.bfloat16, device=META)
    blocks = rows(torch.int64, 100)
    if scorer != "channels":
        make = partial(score.page_logits, spread=scorer == "spread")
        if scorer == "codes":
            make = partial(codes.code_logits, bits=2)
        logits = torch.empty((ROWS, HEADS, PAGES), device=META)
        make(query, rows(), rows(), blocks, logits, layout=LAYOUT, scale=0.1)
        lse = torch.empty((ROWS, HEADS), device=META)
        table, window, _ = choose.weigh(logits, lse, LAYOUT.kv_heads, LAYOUT.page_tokens)
        mass = table
    else:
        parts = score.choose_channels(query, LAYOUT, 16, 0.1)
        logits = score.channel_logits(
            *parts,
            rows(),
            rows(),
            blocks,
            rows(),
            rows(),
            blocks,
            layout=LAYOUT,
            picked=False,
            max_tokens=PAGES * 16 + 64,
        )
        table, mass, window, lse = tokens.score_tokens(
            logits, rows(), kv_heads=LAYOUT.kv_heads, page_tokens=16, max_columns=PAGES
        )
    pages, count, covered = choose.choose(
        table, mass, window, rows(), rows(), rows(), max_chosen=32, sinks=1, p=p
    )
    assert pages.shape == (ROWS, LAYOUT.kv_heads, 32)
    assert count.shape == covered.shape == (ROWS, LAYOUT.kv_heads)
    begin = rows(torch.int32, ROWS * LAYOUT.kv_heads + 1)
    if scorer == "channels":
        alpha = tokens.cover(
            logits, lse, rows(), rows(), pages.flatten(), begin, None, page_tokens=16
        )
        assert alpha.shape == (ROWS, HEADS)
    state = PartialState.empty(*query.shape, META)
    address = rows(torch.int64, pages.numel())
    mask = torch.empty((pages.numel(), 16), dtype=torch.uint8, device=META)
    attend.attend_pages(
        query,
        state,
        PageList(rows(), rows(torch.int64), begin[:-1], begin[1:], address, address, mask),
        layout=LAYOUT,
        scale=0.1,
        max_pages=32,
    )
    finish.finish(state, torch.empty_like(query))
    used = {name for name, recorder in launches.items() if recorder.launches}
    want = {"_choose_kernel", "_attend_kernel", "_finish_kernel"}
    want |= {
        "codes": {"_rotate_kernel", "_logits_kernel", "_weigh_kernel"},
        "channels": {"_channels_kernel", "_sum_kernel", "_score_kernel", "_cover_kernel"},
    }.get(scorer, {"_pages_kernel", "_weigh_kernel"})
    assert used - {"_merge_kernel"} == want


def test_reading_back_would_be_seen() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        rows().sum().item()
    with pytest.raises((RuntimeError, NotImplementedError)):
        rows().cpu()
