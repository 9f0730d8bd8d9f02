"""Selections that are kept: for whom, how long, and what they never do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.kernels.test_dense import assert_near
from tests.oracles.sparse_attention import kept_choices
from tests.sparse.contexts import Contexts, Row
from tests.sparse.test_laws import ALL, KERNELS, PAGED, dense, mean_values
from vllm_ssdkv.attention.compensate import compensate
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.sparse.protocol import Budget, Selection, Selector, page_budget
from vllm_ssdkv.sparse.selection_reuse import RowSizes, SelectionReuse
from vllm_ssdkv.sparse.selectors.sparf import SparfSelector

HEADS, GROUP, SIZE, PAGE = 2, 2, 4, 4
LAYOUT = BlockLayout.unpadded(2 * PAGE, PAGE, HEADS, SIZE, torch.float32)
I64 = NDArray[np.int64]


def selection_of(lists: list[list[int]], *, mask: NDArray[np.uint8] | None = None) -> Selection:
    rows = len(lists) // HEADS
    begin = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    pages = np.array([page for pages in lists for page in pages], np.int32)
    alpha = np.arange(rows * HEADS * GROUP, dtype=np.float32).reshape(rows, -1) / 99
    return Selection(pages, begin, np.full((rows, HEADS), 0.5, np.float32), mask, alpha)


def lists_of(selection: Selection) -> list[list[int]]:
    return [part.tolist() for part in np.split(selection.pages, selection.begin[1:-1])]


def sizes(position: int, pages: int, left: int = 1000) -> RowSizes:
    return RowSizes(np.array([position]), np.array([pages]), np.array([left]))


def never(_: I64) -> Selection:
    raise AssertionError("nothing needs to be chosen")


def test_the_query_is_the_callers_to_write_to() -> None:
    """vLLM uses the memory again in the same step."""
    kept = SelectionReuse(1, LAYOUT, 4, 0.9)
    query = torch.ones(1, HEADS * GROUP, SIZE)
    chosen = selection_of([[0, 1], [0, 2]])
    kept.select(0, ["a"], sizes(100, 12), query, lambda _: chosen)
    again = query.clone()
    query.neg_()
    found, count = kept.select(0, ["a"], sizes(101, 12), again, never)
    assert count == 1
    assert lists_of(found) == [[0, 1], [0, 2]]


@given(data=st.data(), steps=st.integers(2, 5), similarity=st.sampled_from([0.0, 0.7, 0.95]))
def test_it_is_what_the_oracle_says_whoever_else_is_there(
    data: st.DataObject, steps: int, similarity: float
) -> None:
    """Requests come, skip steps, change places; each gets what it gets alone."""
    seed = data.draw(st.integers(0, 2**20))
    source = np.random.default_rng(seed)
    known = [str(i) for i in range(data.draw(st.integers(1, 4)))]
    kept = SelectionReuse(1, LAYOUT, steps, similarity)
    queries: dict[str, list[torch.Tensor]] = {name: [] for name in known}
    position: dict[str, list[int]] = {name: [] for name in known}
    pages: dict[str, list[int]] = {name: [] for name in known}
    left: dict[str, list[int]] = {name: [] for name in known}
    chosen: dict[str, list[list[set[int]]]] = {name: [] for name in known}
    got: dict[str, list[tuple[list[set[int]], bool]]] = {name: [] for name in known}
    for _ in range(8):
        here = [name for name in source.permutation(known).tolist() if source.random() < 0.8]
        if not here:
            continue
        for name in here:
            last = queries[name][-1] if queries[name] else torch.zeros(HEADS * GROUP, SIZE)
            turned = torch.from_numpy(source.normal(size=last.shape)).float()
            queries[name].append(last + turned * float(source.choice([0.05, 0.4, 3.0])))
            before = position[name][-1] if position[name] else 30
            position[name].append(before + int(source.choice([0, 1, 1, 1, 2])))
            had = pages[name][-1] if pages[name] else 4
            pages[name].append(max(1, had + int(source.choice([-2, 0, 0, 0, 2]))))
            left[name].append(PAGE * int(source.integers(1, 12)))
            most = min(pages[name][-1], left[name][-1] // PAGE)
            chosen[name].append(
                [set(source.permutation(pages[name][-1])[:most].tolist()) for _ in range(HEADS)]
            )
        again: list[str] = []

        def choose(rows: I64, here: list[str] = here, again: list[str] = again) -> Selection:
            again += [here[row] for row in rows.tolist()]
            return selection_of(
                [sorted(head) for row in rows.tolist() for head in chosen[here[row]][-1]]
            )

        now = RowSizes(
            *(np.array([values[name][-1] for name in here]) for values in (position, pages, left))
        )
        batch = torch.stack([queries[name][-1] for name in here])
        selection, stayed = kept.select(0, here, now, batch, choose)
        assert stayed == len(here) - len(again)
        lists = lists_of(selection)
        for row, name in enumerate(here):
            heads = lists[row * HEADS : (row + 1) * HEADS]
            assert heads == [sorted(head) for head in heads]
            got[name].append(([set(head) for head in heads], name in again))
    for name in known:
        if not queries[name]:
            continue
        wanted = kept_choices(
            queries[name],
            position[name],
            pages[name],
            left[name],
            lambda number, name=name: chosen[name][number],  # type: ignore[misc]  # one each
            page_tokens=PAGE,
            steps=steps,
            similarity=similarity,
        )
        assert got[name] == wanted


def test_a_query_chooses_for_the_tokens_that_follow() -> None:
    kept = SelectionReuse(2, LAYOUT, 3, 0.9)
    query = torch.randn(1, HEADS * GROUP, SIZE, generator=torch.Generator().manual_seed(1))
    first = selection_of([[0, 3], [2]])
    assert kept.select(1, ["a"], sizes(40, 4), query, lambda _: first) == (first, 0)
    # Another scale of a query changes no order of its logits.
    selection, stayed = kept.select(1, ["a"], sizes(41, 6), 3 * query, never)
    assert stayed == 1
    assert lists_of(selection) == [[0, 3, 4, 5], [2, 4, 5]]
    assert np.array_equal(selection.alpha, first.alpha)  # type: ignore[arg-type]  # not None here
    assert np.array_equal(selection.mass, first.mass)
    second = selection_of([[1], [1]])
    assert kept.select(1, ["a"], sizes(43, 6), query, lambda _: second) == (second, 0)
    # Of the other layer nothing is known.
    assert kept.select(0, ["a"], sizes(44, 6), query, lambda _: first) == (first, 0)
    assert kept.select(1, ["a"], sizes(44, 6), query, never)[1] == 1


@pytest.mark.parametrize(
    ("sizes_then", "turned", "broken"),
    [
        (sizes(40, 4), False, False),  # the same token once more
        (sizes(41, 2), False, False),  # a shorter context
        (sizes(41, 6, 15), False, False),  # no room for what left the window
        (sizes(41, 4), True, False),
        (sizes(41, 4), False, True),
    ],
)
def test_a_row_chooses_at_once(sizes_then: RowSizes, *, turned: bool, broken: bool) -> None:
    kept = SelectionReuse(1, LAYOUT, 3, 0.9)
    query = torch.randn(1, HEADS * GROUP, SIZE, generator=torch.Generator().manual_seed(1))
    kept.select(0, ["a"], sizes(40, 4), query, lambda _: selection_of([[0, 3], [2]]))
    then = query.clone()
    if turned:
        then[0, GROUP:] *= -1  # one of the KV heads
    if broken:
        then[0, 0, 0] = torch.nan
    again = selection_of([[1], []])
    assert kept.select(0, ["a"], sizes_then, then, lambda _: again) == (again, 0)


def test_a_request_that_was_dropped_is_not_known() -> None:
    kept = SelectionReuse(2, LAYOUT, 9, 0.0)
    query = torch.ones(2, HEADS * GROUP, SIZE)
    both = RowSizes(np.array([40, 50]), np.array([4, 4]), np.array([99, 99]))
    for layer in range(2):
        kept.select(layer, ["a", "b"], both, query, lambda _: selection_of([[0], [1], [2], [3]]))
    assert len(kept) == 2
    kept.drop("a")
    kept.drop("nobody")
    assert len(kept) == 1
    anew = selection_of([[3], [3]])
    now = replace(both, position=both.position + 1)
    selection, stayed = kept.select(1, ["a", "b"], now, query, lambda _: anew)
    assert stayed == 1
    assert lists_of(selection) == [[3], [3], [2], [3]]


def test_all_tokens_of_what_left_the_window_are_attended_to() -> None:
    """Where single tokens were chosen; those count, not their pages."""
    kept = SelectionReuse(1, LAYOUT, 9, 0.0)
    query = torch.ones(1, HEADS * GROUP, SIZE)
    mask = np.zeros((3, PAGE), np.uint8)
    mask[:, 1] = 1
    kept.select(0, ["a"], sizes(40, 4), query, lambda _: selection_of([[0, 3], [2]], mask=mask))
    selection, stayed = kept.select(0, ["a"], sizes(41, 6, 2 + 2 * PAGE), query, never)
    assert stayed == 1
    assert lists_of(selection) == [[0, 3, 4, 5], [2, 4, 5]]
    one, every = [0, 1, 0, 0], [1] * PAGE
    assert selection.token_mask is not None
    assert selection.token_mask.tolist() == [one, one, every, every, one, every, every]
    again = selection_of([[], []], mask=mask[:0])
    assert kept.select(0, ["a"], sizes(42, 6, 1 + 2 * PAGE), query, lambda _: again) == (again, 0)


# ---- with selectors, while the context grows ----

BLOCK, WINDOW = 8, 20
GROWING = BlockLayout.unpadded(BLOCK, PAGE, HEADS, 16, torch.float32)


def at(position: int) -> Contexts:
    """A request at this token: its context is what lies wholly before the window."""
    blocks = max(1, (position + 1 - WINDOW) // BLOCK)
    return Contexts(GROWING, GROUP, [Row(blocks, position + 1 - blocks * BLOCK)], seed=3)


def kept_at(
    kept: SelectionReuse, selector: Selector, problem: Contexts, position: int
) -> tuple[Selection, int]:
    summaries = replace(problem.summaries, ahead=kept.steps - 1)
    held = summaries.window_tokens.astype(np.int64)
    left = selector.budget.context_tokens(summaries.context_tokens, held)
    now = RowSizes(np.array([position]), summaries.pages, left)
    return kept.select(
        0,
        ["a"],
        now,
        problem.query,
        lambda _: selector.select(problem.query, summaries, problem.scale, problem.window_lse()),
    )


@given(
    name=st.sampled_from([*PAGED, "sparf by token"]),
    budget=st.builds(lambda share: Budget(share=share), st.floats(0.05, 1))
    | st.builds(lambda tokens: Budget(tokens=tokens), st.integers(0, 150)),
    steps=st.integers(2, 20),
    sinks=st.integers(0, 9),
    start=st.integers(60, 90),
)
@settings(max_examples=40, deadline=None)
def test_the_budget_is_never_exceeded_and_nothing_is_lost(
    name: str, budget: Budget, steps: int, sinks: int, start: int
) -> None:
    selector: Selector = SparfSelector(budget, 5, "token", sinks, KERNELS)
    if name in PAGED:
        selector = PAGED[name](budget, sinks)
    kept = SelectionReuse(1, GROWING, steps, 0.0)
    since, stays, had = 0, 0, 0
    for position in range(start, start + 40):
        problem = at(position)
        selection, stayed = kept_at(kept, selector, problem, position)
        pages = int(problem.summaries.pages[0])
        held = problem.summaries.window_tokens.astype(np.int64)
        left = selector.budget.context_tokens(problem.summaries.context_tokens, held)[0]
        mask = selection.token_mask
        for begin, end in zip(selection.begin[:-1], selection.begin[1:], strict=True):
            tokens = (end - begin) * PAGE if mask is None else int(mask[begin:end].sum())
            assert tokens <= left
            if mask is None:
                assert end - begin <= page_budget(selector.budget, problem.summaries)[0]
            if stayed:
                assert set(range(had, pages)) <= set(selection.pages[begin:end].tolist())
        had = had if stayed else pages
        since = since + 1 if stayed else 0
        stays += stayed
        assert since < steps
    if budget.tokens is None and budget.share is not None and budget.share > 0.5:
        # The window takes less than the budget: only the number of tokens ends a choice.
        assert stays == 40 - -(-40 // steps)


@pytest.mark.parametrize("name", PAGED)
def test_with_all_of_the_budget_it_is_dense(name: str) -> None:
    selector = PAGED[name](ALL, 0)
    if name.startswith("adaptive"):
        selector.p = 1.0  # type: ignore[attr-defined]  # an adaptive one
    kept = SelectionReuse(1, GROWING, 30, 0.0)
    stays = 0
    for position in range(60, 80):
        problem = at(position)
        selection, stayed = kept_at(kept, selector, problem, position)
        stays += stayed
        state = problem.state()
        problem.attend_window(state)
        listed = problem.page_list(selection)
        problem.kernels.attend_pages(problem.query, state, listed, problem.layout, problem.scale)
        if selection.alpha is not None:
            alpha = torch.from_numpy(selection.alpha)
            compensate(state, torch.arange(1), alpha, mean_values(problem))
        assert_near(state.acc / state.l[..., None], dense(problem), 1e-5)
    assert stays == 19
