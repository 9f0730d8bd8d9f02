"""A selection of rows with different selectors is what each of them chose."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.sparse.concat import concat
from vllm_ssdkv.sparse.protocol import Selection

HEADS, QUERY_HEADS, PAGE = 2, 4, 16


def made(rows: int, seed: int, *, mask: bool, alpha: bool) -> Selection:
    source = np.random.default_rng(seed)
    counts = source.integers(0, 4, rows * HEADS)
    begin = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return Selection(
        source.integers(0, 99, begin[-1]).astype(np.int32),
        begin,
        source.random((rows, HEADS), np.float32),
        source.integers(0, 2, (begin[-1], PAGE)).astype(np.uint8) if mask else None,
        source.random((rows, QUERY_HEADS), np.float32) if alpha else None,
    )


@given(
    owner=st.lists(st.integers(0, 2), min_size=1, max_size=8),
    kinds=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=3, max_size=3),
    seed=st.integers(0, 99),
)
def test_each_row_has_what_was_chosen_for_it(
    owner: list[int], kinds: list[tuple[bool, bool]], seed: int
) -> None:
    parts = []
    for number in sorted(set(owner)):
        which = np.flatnonzero(np.array(owner) == number)
        mask, alpha = kinds[number]
        parts.append((which, made(len(which), seed + number, mask=mask, alpha=alpha)))
    whole = concat(parts, HEADS, PAGE)
    assert len(whole.begin) == len(owner) * HEADS + 1
    for which, part in parts:
        for place, row in enumerate(which.tolist()):
            assert np.array_equal(whole.mass[row], part.mass[place])
            if part.alpha is not None:
                assert whole.alpha is not None
                assert np.array_equal(whole.alpha[row], part.alpha[place])
            elif whole.alpha is not None:
                assert np.isnan(whole.alpha[row]).all()
            for head in range(HEADS):
                one = slice(*whole.begin[row * HEADS + head :][:2])
                its = slice(*part.begin[place * HEADS + head :][:2])
                assert np.array_equal(whole.pages[one], part.pages[its])
                if part.token_mask is not None:
                    assert whole.token_mask is not None
                    assert np.array_equal(whole.token_mask[one], part.token_mask[its])
                elif whole.token_mask is not None:
                    assert whole.token_mask[one].all()
