"""Clusters of running requests: where they come from, how they grow, and when they go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.sparse.contexts import Contexts, Row
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.kernels.scoring import CpuScoringKernels
from vllm_ssdkv.sparse.context_clusters import QUERIES, ClusterOptions, ContextClusters
from vllm_ssdkv.sparse.protocol import Budget, ContextSummaries, Selection
from vllm_ssdkv.sparse.selectors.bounds import BoundsSelector
from vllm_ssdkv.sparse.selectors.swarm import SwarmSelector
from vllm_ssdkv.sparse.selectors.window import WindowSelector

PAGE, HEADS, SIZE = 16, 2, 64
GROUPS, OF_GROUP = 6, 4
PAGES = 1 + GROUPS * OF_GROUP
"""Of a sink, and of groups of pages with a key that the queries of their group are like."""
KERNELS = CpuScoringKernels(1)
BUDGET = Budget(tokens=2 + (1 + OF_GROUP) * PAGE)
"""A group beside the window of 3 tokens and the sink."""


def selector(budget: Budget = BUDGET) -> SwarmSelector:
    return SwarmSelector(BoundsSelector(budget, PAGE, KERNELS), budget, PAGE, KERNELS)


def made(largest: int = 8) -> ContextClusters:
    return ContextClusters(2, HEADS, ClusterOptions(0.5, largest, "jaccard", sinks=1))


@pytest.fixture(scope="module")
def problem() -> Contexts:
    """Two requests with such contexts, and the directions of their groups in ``query``."""
    layout = BlockLayout.unpadded(PAGE, PAGE, HEADS, SIZE, torch.float32)
    found = Contexts(layout, 1, [Row(PAGES, 3), Row(PAGES, 3)], seed=2)
    for row in range(2):
        for page in range(1, PAGES):
            key = direction(page % GROUPS).view(1, SIZE).repeat(HEADS, 1) * 9
            found.plant(row, page * PAGE + 5, key)
    return found


def direction(group: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(group), SIZE).float()


def members(group: int) -> list[int]:
    """Pages of a group, and the sink."""
    return [0, *(page for page in range(1, PAGES) if page % GROUPS == group)]


def queries(groups: Sequence[int]) -> torch.Tensor:
    """One for each, [n, HEADS, SIZE]."""
    return torch.stack([direction(group).repeat(HEADS, 1) * 9 for group in groups])


def first_pages(context: ContextSummaries, blocks: int) -> ContextSummaries:
    """The same rows when their contexts were shorter."""
    return replace(context, row_end=context.row_begin + np.int32(blocks))


def decode(
    clusters: ContextClusters,
    problem: Contexts,
    group: int,
    names: Sequence[str] = ("a", "b"),
    blocks: int = PAGES,
) -> Selection:
    """Both rows choose with queries of a group, in layer 0."""
    context = first_pages(problem.summaries, blocks)
    return clusters.select(
        selector(), 0, names, queries([group, group]), context, problem.scale, None
    )


def lists(selection: Selection) -> list[list[int]]:
    return [one.tolist() for one in np.split(selection.pages, selection.begin[1:-1])]


def test_queries_of_the_prompt_make_clusters(problem: Contexts) -> None:
    clusters = made()
    for name in "ab":
        clusters.note_prompt(0, name, queries([i % GROUPS for i in range(QUERIES)]))
    assert lists(decode(clusters, problem, 2)) == [members(2)] * 2 * HEADS
    totals = clusters.totals
    assert totals.clusters == 2 * HEADS * (GROUPS + 1)  # the sink is alone
    assert totals.members == totals.pages == 2 * HEADS * PAGES


def test_only_the_last_queries_count_however_they_come(problem: Contexts) -> None:
    groups = [i // 7 % GROUPS for i in range(3 * QUERIES)]
    whole = queries(groups)
    found = []
    for sizes in ([3 * QUERIES], [QUERIES] * 3, [100, 60, 1, 20, 11]):
        clusters = made()
        for part in torch.split(whole, sizes):
            clusters.note_prompt(0, "a", part)
        context = problem.only(0).summaries
        clusters.select(selector(), 0, ["a"], queries([1]), context, problem.scale)
        found.append(clusters.totals)
    last = made()
    last.note_prompt(0, "a", whole[-QUERIES:])
    last.select(selector(), 0, ["a"], queries([1]), problem.only(0).summaries, problem.scale)
    assert found == [last.totals] * 3
    assert last.totals.clusters < last.totals.pages


def test_without_a_prompt_decode_counts(problem: Contexts) -> None:
    """Until then pages are by themselves, and chosen as the scorer chooses them."""
    clusters = made()
    plain = BoundsSelector(BUDGET, PAGE, KERNELS)
    for token in range(QUERIES):
        group = token % GROUPS
        found = decode(clusters, problem, group)
        by = queries([group, group])
        want = plain.select(by, problem.summaries, problem.scale)
        np.testing.assert_array_equal(found.pages, want.pages)
        assert (clusters.totals.clusters == clusters.totals.pages) == (token < QUERIES - 1)
    assert clusters.totals.clusters == 2 * HEADS * (GROUPS + 1)


def test_new_pages_join_after_a_window_of_tokens(problem: Contexts) -> None:
    clusters = made()
    for name in "ab":
        clusters.note_prompt(0, name, queries([i % GROUPS for i in range(QUERIES)]))
    decode(clusters, problem, 0, blocks=PAGES - 3)
    old = clusters.totals.clusters
    assert old < clusters.totals.pages == 2 * HEADS * (PAGES - 3)
    for token in range(QUERIES - 1):
        decode(clusters, problem, token % GROUPS)
        alone = token < QUERIES - 2
        assert clusters.totals.clusters == old + (2 * HEADS * 3 if alone else 0)
    assert clusters.totals.pages == 2 * HEADS * PAGES
    assert lists(decode(clusters, problem, 1)) == [members(1)] * 2 * HEADS


def test_what_a_request_gets_does_not_depend_on_others(problem: Contexts) -> None:
    together, alone = made(), made()
    for i, name in enumerate("ab"):
        prompt = queries([(j // (i + 2)) % GROUPS for j in range(40)])
        together.note_prompt(0, name, prompt)
        if name == "b":
            alone.note_prompt(0, name, prompt)
    both = decode(together, problem, 3)
    single = alone.select(
        selector(), 0, ["b"], queries([3]), problem.only(1).summaries, problem.scale
    )
    assert lists(single) == lists(both)[HEADS:]


def test_a_request_that_ends_leaves_nothing(problem: Contexts) -> None:
    clusters = made()
    clusters.note_prompt(0, "a", queries([1, 2]))
    clusters.note_prompt(1, "c", queries([1, 2]))
    decode(clusters, problem, 0)
    assert len(clusters) == 3
    for name in "abc":
        clusters.drop(name)
    assert len(clusters) == 0
    assert clusters.totals == made().totals


def test_a_context_that_is_shorter_begins_anew(problem: Contexts) -> None:
    clusters = made()
    clusters.note_prompt(0, "a", queries([i % GROUPS for i in range(QUERIES)]))
    decode(clusters, problem, 0)
    decode(clusters, problem, 0, blocks=9)
    assert clusters.totals.clusters == clusters.totals.pages == 2 * HEADS * 9


def test_members_are_bounded(problem: Contexts) -> None:
    clusters = made(largest=3)
    random = np.random.default_rng(0)
    for name in "ab":
        clusters.note_prompt(0, name, queries(random.integers(0, GROUPS, QUERIES).tolist()))
    for _ in range(2 * QUERIES):
        decode(clusters, problem, int(random.integers(0, GROUPS)))
        assert clusters.totals.members <= 3 * clusters.totals.pages


def test_channels_on_drives_are_not_read_for_prompts(problem: Contexts) -> None:
    clusters = made()
    clusters.note_prompt(0, "a", queries([i % GROUPS for i in range(QUERIES)]))
    context = replace(problem.only(0).summaries, channel_source=lambda _: np.empty(0, np.uint64))
    clusters.select(selector(), 0, ["a"], queries([1]), context, problem.scale)
    assert clusters.totals.clusters == clusters.totals.pages


def test_a_selector_without_scores_is_refused(problem: Contexts) -> None:
    with pytest.raises(ValueError, match="window does not score pages"):
        made().select(
            WindowSelector(BUDGET, 0),
            0,
            ["a", "b"],
            queries([1, 1]),
            problem.summaries,
            problem.scale,
        )


def test_sinks_are_in_no_company(problem: Contexts) -> None:
    """Every query chooses them, so all pages would gather around them."""
    clusters = made()
    for name in "ab":
        clusters.note_prompt(0, name, queries([1] * QUERIES))
    decode(clusters, problem, 1)
    assert clusters.totals.clusters == 2 * HEADS * (PAGES - OF_GROUP + 1)


def test_pages_that_a_cluster_brought_do_not_count() -> None:
    """A new page joins the company that queries choose with it, not what comes beside that.

    Four pages are a cluster. Each query then seeks the new page, one member of the cluster, and two
    pages beside, which take turns. The cluster brings its medoid with the member.
    """
    member, alone, new = range(1, 5), range(5, 11), 11
    layout = BlockLayout.unpadded(PAGE, PAGE, HEADS, SIZE, torch.float32)
    context = Contexts(layout, 1, [Row(new + 1, 3)], seed=3)
    for page in range(1, new + 1):
        own = direction(SIZE - 1 - page).view(1, SIZE).repeat(HEADS, 1) * 40
        context.plant(0, page * PAGE + 5, own)
        if page in member:
            context.plant(0, page * PAGE + 6, direction(0).view(1, SIZE).repeat(HEADS, 1) * 40)
    joined = []
    for sought in member:
        clusters = made()
        clusters.note_prompt(0, "a", queries([0] * QUERIES))
        for token in range(QUERIES):
            beside = [alone[(2 * token + i) % len(alone)] for i in range(2)]
            query = 20 * direction(SIZE - 1 - new) + 20 * direction(SIZE - 1 - sought)
            query += sum(5 * direction(SIZE - 1 - page) for page in beside)
            found = clusters.select(
                selector(),
                0,
                ["a"],
                query.repeat(1, HEADS, 1),
                first_pages(context.summaries, new + min(token, 1)),
                context.scale,
            )
            assert len(set(lists(found)[0]) & set(member)) > 1, "the cluster's others come, too"
        # The sink, the cluster, those beside, and the new page, if it is alone.
        joined.append(clusters.totals.clusters == HEADS * (2 + len(alone)))
        assert clusters.totals.clusters == HEADS * (3 + len(alone) - joined[-1])
    assert sum(joined) == 1, "where the member that queries seek is the medoid itself"
