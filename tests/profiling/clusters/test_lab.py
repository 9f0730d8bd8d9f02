"""The lab on synthetic traces: laws of recall, clusters, schedules, and all tables."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.oracles import cluster_reads
from tests.profiling.clusters.synthetic import trace
from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.clusters import lab, mass_recall, page_clusters, published, upkeep
from vllm_ssdkv.profiling.clusters.lab import Settings
from vllm_ssdkv.profiling.clusters.layer_reads import Scored, baseline
from vllm_ssdkv.profiling.clusters.stability import Activity, control, half_test, stability
from vllm_ssdkv.profiling.clusters.summary import summary_table
from vllm_ssdkv.profiling.clusters.trace import F32, PAGE, Trace, budget_pages

SETTINGS = Settings(budgets=(0.1,), drives=(1, 4), heads=2, batches=(1, 2), tokens=False)


@pytest.fixture(scope="module")
def head() -> mass_recall.Head:
    one = trace()
    return mass_recall.Head.of(one, 0, 0, one.decode_steps[::4])


def by_method(found: Iterable[mass_recall.Recall]) -> dict[str, float]:
    """The share of each method at the one budget that was asked for."""
    return {name: value for _, name, value in found}


def test_no_selector_recalls_more_than_the_oracle(head: mass_recall.Head) -> None:
    found = by_method(mass_recall.single_pages(head, [0.1]))
    for name, value in found.items():
        _, _, order = name.partition(", keys in")
        oracle = f"oracle, keys in{order}" if order else "oracle"
        if "co-activation" not in name:
            assert 0 <= value <= found[oracle] + 1e-6, name
    others = [*mass_recall.swarm(head, [0.1]), *mass_recall.infllm(head, [0.1])]
    assert all(value <= found["oracle"] + 1e-6 for _, _, value in others)


def test_pages_of_alike_keys_hold_more(head: mass_recall.Head) -> None:
    found = by_method(mass_recall.single_pages(head, [0.1]))
    assert found["oracle, keys in 128"] > 1.2 * found["oracle"]
    assert found["spread, keys in 512"] > 1.2 * found["spread"]


def test_the_whole_budget_recalls_everything(head: mass_recall.Head) -> None:
    whole = [*mass_recall.single_pages(head, [1.0]), *mass_recall.swarm(head, [1.0])]
    for _, name, value in whole:
        if "no dedup" not in name:
            assert value == pytest.approx(1, abs=1e-4), name


def test_orders_give_the_same_mass(head: mass_recall.Head) -> None:
    for order in mass_recall.orders(head).values():
        pages = mass_recall.page_scores(head, order)["oracle"]
        np.testing.assert_allclose(pages.sum(1), head.mass.sum(1), rtol=1e-4)


@pytest.mark.parametrize("variant", page_clusters.VARIANTS, ids=lambda one: one.name)
def test_clusters_cover_all_pages(head: mass_recall.Head, variant: page_clusters.Variant) -> None:
    made = page_clusters.clusters_of(head.profile, variant)
    assert (made.copies() >= 1).all()
    if not variant.copies:
        assert (made.copies() == 1).all()
    again = page_clusters.clusters_of(head.profile, variant)
    np.testing.assert_array_equal(made.member, again.member)


def test_activated_clusters_fill_the_budget(head: mass_recall.Head) -> None:
    made = page_clusters.clusters_of(head.profile, page_clusters.VARIANTS[0])
    scores = np.random.default_rng(0).random(len(made)).astype(np.float32)
    picked = page_clusters.activated(scores, made, 10)
    pages: set[int] = set()
    for number in picked.tolist():
        assert len(pages) < 10
        assert not set(made[number].tolist()) <= pages
        pages |= set(made[number].tolist())
    assert len(pages) >= 10


def test_schedules_read_what_counting_one_by_one_says() -> None:
    one, drives = trace(), 4
    clusters, which = lab.activated_clusters(one, one.adjacent_heads(4), SETTINGS)
    loads = {
        s: page_clusters.scheduled(which, clusters, drives, s) for s in page_clusters.SCHEDULES
    }
    lists = [[members.tolist() for members in found.lists()] for found in clusters]
    for step, picked in enumerate(which):
        wanted = [pages.tolist() for pages in picked]
        lie = cluster_reads.as_they_lie(cluster_reads.places(lists, wanted, drives), drives)
        assert loads["static"].pages[step].tolist() == lie
        entries = cluster_reads.replicas(lists, wanted, drives)
        firsts = [sum(where[0] == drive for where in entries) for drive in range(drives)]
        assert loads["no balance"].pages[step].tolist() == firsts
        full = loads["full"].pages[step]
        assert full.sum() == len(entries)
        assert full.max() == cluster_reads.least_of_the_busiest(entries, drives)
        every_copy = loads["no dedup"].pages[step]
        assert every_copy.sum() == sum(lie)
        assert full.max() <= every_copy.max() <= max(lie)
    assert (loads["static"].pages != loads["no balance"].pages).any()


@pytest.mark.parametrize("copies", [1, 2])
def test_the_same_pages_where_slots_have_them(copies: int) -> None:
    """On the drive of slot and head, of two copies also on the next: the less loaded is read."""
    one, drives = trace(), 4
    clusters, which = lab.activated_clusters(one, one.adjacent_heads(4), SETTINGS)
    load = page_clusters.stored(which, clusters, drives, 8, copies)
    for step, picked in enumerate(which):
        entries = [
            [(page // 8 + head + copy) % drives for copy in range(copies)]
            for head, numbers in enumerate(picked)
            for page in {page for n in numbers for page in clusters[head][n].tolist()}
        ]
        assert load.pages[step].sum() == len(entries)
        busiest = cluster_reads.least_of_the_busiest(entries, drives)
        assert load.pages[step].max() == busiest


def test_published_ratios_of_schedules_are_of_the_named_ones() -> None:
    """P11: time as members lie over that of the whole schedule, every copy over each page once."""
    traces, drives = [trace(tokens=1024), trace("b", seed=3, tokens=1024)], 8
    settings = replace(SETTINGS, drives=(1, drives))
    counted = [
        cluster_reads.totals(*lab.activated_clusters(one, one.adjacent_heads(8), settings), drives)
        for one in traces
    ]
    found = [(one["static"] / one["full"], one["copies"] / one["pages"]) for one in counted]
    table = lab.schedule_table(traces, settings)
    text = lab.schedule_ratios([table], settings)
    assert text == "; ".join(f"{min(of):.2f}x .. {max(of):.2f}x" for of in zip(*found, strict=True))
    rows = {(name, of): times for name, of, *times in table.rows if of == drives}
    for number, one in enumerate(traces):
        args = one, one.adjacent_heads(8), settings, page_clusters.NO_REPLICA
        alone = cluster_reads.totals(*lab.activated_clusters(*args), drives)
        times = (rows[name, drives][number] for name in ("no replica", "full"))
        ratio = alone["full"] / counted[number]["full"]
        assert next(times) / next(times) == pytest.approx(ratio, rel=1e-6)


def test_bytes_at_equal_recall_meet_their_meaning() -> None:
    one = trace()
    heads, steps = one.heads(), one.decode_steps[::8]
    scored, count, recall = baseline(one, heads, steps)
    assert count == budget_pages(0.1, one.pages)
    assert scored.pages_for(recall) == count
    other = Scored.of(one, heads, steps, 128, "spread")
    need = other.pages_for(recall)
    assert other.recall()[need - 1] >= recall - 1e-6
    assert need == 1 or other.recall()[need - 2] < recall
    assert need < count


def test_co_activation_is_found_where_it_was_made() -> None:
    one = trace(tokens=4096, queries=1024)
    here = Activity.of(one, 0, 0)
    found = half_test(here)
    assert found["co-activation, Jaccard"] > 1.5 * found["popularity"]
    assert found["co-activation, Jaccard"] > 1.3 * found["co-activation, steps shuffled"]
    steady = stability(here)
    assert steady["overlap of t and t+1"] > 2 * steady["overlap of t and t+8"]
    other = Activity.of(trace(seed=7, tokens=4096, queries=1024), 0, 0)
    assert control(here, other) < 0.5
    assert control(here, here) >= control(here, other)


def test_clusters_that_grew_are_judged_by_queries_that_come_later() -> None:
    """Pages 1 to 3 are a cluster. While new pages are watched, page 30 is chosen with two of them;
    later it is never chosen again, and each pair of the three in half of its queries."""
    of_cluster = [{1, 2, 3}] * 40
    watched = [{30, *({1, 2, 3} - {1 + query % 3})} for query in range(20)]
    later = [{1, 2, 3}] * 10 + [{page, 8, 9} for page in (1, 2, 3)] * 10
    chosen = [*of_cluster, *watched, *later]
    pages = 65  # 60 have ended when the watching begins, so that three of the old are a budget
    size = 80
    key = np.eye(pages, size, dtype=np.float16).repeat(PAGE, axis=0)[: 60 * PAGE - 40 + len(chosen)]
    query = np.zeros((len(chosen), size), np.float16)
    for row, wanted in enumerate(chosen):
        query[row, list(wanted)] = 16
    one = Trace("made", query[None, None], key[None, None], np.arange(1), 2 * PAGE, 0, 1.0)
    found = upkeep.distances(one, 0, 0)
    # Two old members at 1/2, and new ones at 1, over 1/2. The other rules take all 32 new pages.
    mean = {"rule (9), corrected": 2 / 3, "Min-Diff": 33 / 34, "Min-Size": 33 / 34}
    assert found == pytest.approx({name: 2 * value for name, value in mean.items()})


def test_all_tables() -> None:
    traces = [trace("a"), trace("b", seed=3)]
    tables = lab.measure(traces, SETTINGS, lambda _: None)
    assert [table.title.split(",")[0].split(" at ")[0] for table in tables] == [
        "Attention mass",
        "Bytes",
        "Time of a layer's reads",
        "Pages of the busiest drive",
        "Swarm's reads of clusters",
        "Hit rate of the cache",
        "Right of 16 pages that are read ahead per head",
        "Gains over version 1: times less",
        "Published figures and ours",
    ]
    assert all(table.rows for table in tables)
    assert [row[0] for row in tables[-1].rows] == [f"P{n}" for n in range(9, 16)]
    text = tables[0].markdown()
    assert text.count("\n|") == len(tables[0].rows) + 2
    summary = summary_table(traces)
    assert {row[0] for row in summary.rows} >= {"overlap of t and t+1", "newest pages"}


needs_extra = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("faiss", "sklearn")),
    reason="needs the extra clusters",
)


@needs_extra
def test_selection_by_medoids_searches_these(monkeypatch: pytest.MonkeyPatch) -> None:
    import faiss

    searched: set[tuple[int, int]] = set()

    search: Any = faiss.IndexFlatIP.search

    def seen(index: faiss.IndexFlatIP, query: F32, count: int) -> object:
        searched.add((index.ntotal, count))
        return search(index, query, count)

    monkeypatch.setattr(faiss.IndexFlatIP, "search", seen)
    keys = np.random.default_rng(0).normal(size=(3200, 8)).astype(np.float32)
    assert published.selection_speedup(keys, keys[:250], keys[:2], repeats=1) > 0
    assert searched == {(3200, 320), (250, 25)}


@needs_extra
def test_tokens_recall_more_than_pages(head: mass_recall.Head) -> None:
    found = by_method(mass_recall.tokens(head, [0.1]))
    oracle = by_method(mass_recall.single_pages(head, [0.1]))["oracle"]
    assert oracle < found["tokens: oracle"]
    assert oracle < found["k-means, tokens (RetroInfer)"] <= found["tokens: oracle"] + 1e-6
    assert found["k-means, whole pages"] <= found["k-means, tokens (RetroInfer)"]
    assert found["tokens: PQ (PQCache)"] <= found["tokens: oracle"] + 1e-6


def test_missing_libraries_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BenchError, match=r"pip install 'vllm-ssdkv\[clusters\]'"):
        lab.measure([trace()], replace(SETTINGS, tokens=True), lambda _: None)


def test_a_context_is_whole_pages() -> None:
    with pytest.raises(ValueError, match="a context of"):
        replace(trace(), context=PAGE + 1)
