"""Error of sparse attention as it is told, against exact attention itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.attention.test_sparse import (
    BLOCK,
    GEOMETRY,
    HEADS,
    LAYERS,
    LENGTHS,
    PAGE,
    QUERY_HEADS,
    SCALE,
    Rows,
    away,
    choose,
    dense,
    make_rows,
    make_store,
    queries_of,
)
from vllm_ssdkv.attention.sparse_deviation import Compared, SparseDeviation
from vllm_ssdkv.kernels.operands.block_layout import PartialState
from vllm_ssdkv.sparse.protocol import Budget

__all__ = ["make_rows", "make_store"]

MakeRows = Callable[..., Rows]


@pytest.mark.parametrize("places", [16, 64])
def test_all_of_the_context_deviates_by_nothing(make_rows: MakeRows, places: int) -> None:
    """With 16 places the pages come in turns."""
    rows = make_rows(places)
    away(rows)
    chosen, deviation = choose(rows), SparseDeviation(1)
    for layer in range(LAYERS):
        rows.attend(chosen, Budget(share=1.0), layer, queries_of(layer), deviation=deviation)
    chosen.close()
    found = deviation.take()
    assert list(found) == list(range(LAYERS))
    for figures in found.values():
        assert figures["outputs"] == len(LENGTHS) * QUERY_HEADS
        assert figures["worst_relative_l2"] < 1e-5
        assert figures["mass"] == pytest.approx(1, abs=1e-5)
        assert figures["recall"] == pytest.approx(1, abs=1e-6)
    assert deviation.take() == {}


class Keeping(SparseDeviation):
    """Keeps what was chosen, too."""

    def compare(
        self, layer: int, rows: Compared, window: PartialState, state: PartialState
    ) -> None:
        self.selections = {layer: rows.selection}
        super().compare(layer, rows, window, state)


def weights_of(rows: Rows, row: int, queries: torch.Tensor) -> torch.Tensor:
    """Exact softmax of layer 0, mean over query heads, [kv_heads, tokens]."""
    keys = rows.keys[row][0, : LENGTHS[row]].double().transpose(0, 1)
    grouped = queries[row].double().view(HEADS, -1, keys.shape[2])
    return torch.softmax(grouped @ keys.mT * SCALE, 2).mean(1)


def test_a_part_of_the_context_deviates_by_what_it_leaves_out(make_rows: MakeRows) -> None:
    rows, queries = make_rows(), queries_of(0)
    chosen, deviation = choose(rows), Keeping(1)
    out, _ = rows.attend(chosen, Budget(share=0.4), 0, queries, deviation=deviation)
    selection = deviation.selections[0]
    chosen.close()
    figures = deviation.take()[0]
    wanted = dense(rows, 0, queries)
    off = (out.double() - wanted).norm(dim=2) / wanted.norm(dim=2)
    assert figures["relative_l2"] == pytest.approx(float(off.mean()), rel=1e-4)
    assert figures["worst_relative_l2"] == pytest.approx(float(off.max()), rel=1e-4)
    masses, taken, best = [], 0.0, 0.0
    for row, slots in enumerate(rows.contexts()):
        context = len(slots) * BLOCK
        for head, weights in enumerate(weights_of(rows, row, queries)):
            begin, end = selection.begin[row * HEADS + head :][:2]
            pages = weights[:context].view(-1, PAGE).sum(1)
            mine = float(pages[torch.from_numpy(selection.pages[begin:end]).long()].sum())
            masses.append(mine + float(weights[context:].sum()))
            taken += mine
            best += float(pages.sort(descending=True).values[: end - begin].sum())
    assert figures["mass"] == pytest.approx(sum(masses) / len(masses), rel=1e-4)
    assert figures["recall"] == pytest.approx(taken / best, rel=1e-4)
    assert 0.2 < figures["recall"] < 1
    assert figures["estimated_mass"] == pytest.approx(float(selection.mass.mean()), rel=1e-5)


def test_it_changes_no_bit_and_rests_between(make_rows: MakeRows) -> None:
    rows, queries = make_rows(), queries_of(1)
    plain, compared = choose(rows), choose(rows)
    wanted, _ = rows.attend(plain, Budget(share=0.4), 1, queries)
    deviation = SparseDeviation(3)
    assert [deviation.of_step() is deviation for _ in range(6)] == [False, False, True] * 2
    out, _ = rows.attend(compared, Budget(share=0.4), 1, queries, deviation=deviation)
    assert torch.equal(out, wanted)
    plain.close()
    compared.close()


def test_a_row_that_cannot_be_read_whole_is_left_out(make_rows: MakeRows) -> None:
    rows, deviation = make_rows(), SparseDeviation(1)
    away(rows)
    choose(rows).close()  # brings the summaries
    slot = int(rows.contexts()[2][0])
    rows.rig.flip(slot, GEOMETRY.layer_offset(0) + 5)
    chosen = choose(rows)
    rows.attend(chosen, Budget(tokens=0), 0, queries_of(0), deviation=deviation)
    assert chosen.poisoned == {2}
    chosen.close()
    assert deviation.take()[0]["outputs"] == 2 * QUERY_HEADS
