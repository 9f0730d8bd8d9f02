"""X of blocks that are not full yet: places by HBM block, whoever has it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.offload.xcache.open_inputs import OpenInputs

LAYERS, BLOCK, HIDDEN = 2, 4, 3


def record(made: OpenInputs, blocks: list[int], offsets: list[int], values: torch.Tensor) -> None:
    """Values [T, layers, hidden] of tokens at these places."""
    targets = made.targets(np.array(blocks), np.array(offsets))
    tokens = torch.arange(len(blocks))
    for layer in range(LAYERS):
        made.record(layer, values[:, layer], tokens, torch.from_numpy(targets))


def opened() -> OpenInputs:
    return OpenInputs(LAYERS, BLOCK, HIDDEN, torch.float32, torch.device("cpu"))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), min_size=1, max_size=12))
def test_every_block_has_what_was_recorded(turns: list[tuple[int, int]]) -> None:
    """Requests get blocks, some are forgotten; the others' X stays while memory grows."""
    made, block = opened(), 0
    wanted = dict[int, torch.Tensor]()
    owners = dict[int, list[int]]()
    for owner, count in turns:
        if count % 5 == 0:
            made.forget(str(owner))
            for gone in owners.pop(owner, ()):
                del wanted[gone]
            continue
        new = list(range(block, block + count))
        block += count
        made.assign(str(owner), new)
        owners.setdefault(owner, []).extend(new)
        places = [(b, o) for b in new for o in range(BLOCK)]
        values = torch.randn(len(places), LAYERS, HIDDEN)
        record(made, [p[0] for p in places], [p[1] for p in places], values)
        shaped = values.view(count, BLOCK, LAYERS, HIDDEN).transpose(1, 2)
        wanted |= dict(zip(new, shaped, strict=True))
    assert len(made) == len(wanted)
    for number, value in wanted.items():
        assert torch.equal(made.of(number), value)


def test_memory_is_that_of_open_blocks() -> None:
    made = opened()
    for turn in range(50):
        made.assign("a", range(turn, turn + 3))
        made.release(range(turn, turn + 3))
    assert len(made) == 0
    assert made.nbytes == LAYERS * 8 * BLOCK * HIDDEN * 4
    with pytest.raises(KeyError):
        made.of(1)


def test_a_block_that_goes_to_another_request_is_its_own() -> None:
    made = opened()
    made.assign("a", [1])
    made.assign("b", [1])
    made.forget("a")
    assert made.of(1).shape == (LAYERS, BLOCK, HIDDEN)
    made.forget("b")
    assert len(made) == 0
