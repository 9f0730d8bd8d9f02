"""Cases of the bench, on small contexts and with drives in their own time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.offload.testing.drive_timing import DRIVES
from vllm_ssdkv.profiling.offload.bench import (
    DRAM,
    FLASH,
    FLEXGEN,
    Case,
    Settings,
    cases,
    formula,
    run,
)
from vllm_ssdkv.profiling.offload.rig import Contexts, Effort, Sizes
from vllm_ssdkv.profiling.offload.tables import find, tables

SETTINGS = Settings(
    contexts=[2048],
    batches=[2],
    selectors=["exact", "bounds"],
    ways=["none", "host", "shared", "instinfer", "smartssd"],
    drives=[1, 2],
    intervals=[1, 16, 32],
    budget=0.125,
    dilation=8.0,
    threads=1,
    x_shares=[0, 0.5, 1],
    effort=Effort(16, 2, 0.2),
    sizes=Sizes(layers=2, kv_heads=2, queries_per_kv=2, head_size=64),
    memory_bytes=8 * MIB,
)


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Figures of all cases."""
    told: list[str] = []
    directory = tmp_path_factory.mktemp("bench")
    found = run(SETTINGS, directory, told.append)
    assert len(told) == 2 + len(found["rows"]) + len(found["writes"])
    assert not list(directory.iterdir())
    return found


def test_cases_that_share_contexts_follow_each_other() -> None:
    every = list(cases(SETTINGS))
    assert len(set(every)) == len(every)
    seen = [one.contexts for one in every]
    changes = sum(a != b for a, b in itertools.pairwise(seen))
    # Two selectors in DRAM and behind links, blocks of 16 and of 32 tokens for the curve.
    assert changes + 1 == 6
    assert len(set(seen)) == 5  # exact, blocks of 16, in DRAM: twice
    link = [one for one in every if one.place == "smartssd" and one.way == "none"]
    assert [one.link for one in link[:2]] == [1e9, 2e9]
    assert Case(Contexts(2048, 2, on_drive=True), "host", "instinfer", 1, 7e9) in every
    assert [one.place for one in every if one.way == "shared"] == [DRAM, DRAM]


def test_bytes_over_the_link_are_those_of_the_formula(document: dict[str, Any]) -> None:
    rows = [row for row in document["rows"] if row["place"] == FLASH and not row["interval"]]
    rows += [row for row in document["rows"] if (row["way"], row["place"]) == ("host", DRAM)]
    assert len(rows) == 2 * (2 * 2 + 1)
    for row in rows:
        devices = max(1, row["drives"])
        q, d, heads = 4, 64, 2
        want = devices * (2 * q * d + q * (4 * d + 8)) + 4 * heads * d
        if row["selector"] == "bounds":
            want += (2048 - 64) / 16 * heads / 8
        assert sum(row["link_bytes"].values()) == pytest.approx(want, rel=0.02), row
        contexts = Contexts(2048, 2, row["selector"])
        assert row["link_formula"] == formula(SETTINGS.sizes, contexts, devices) == want


def test_the_model_of_the_drives_is_the_limit(document: dict[str, Any]) -> None:
    for profile in ("instinfer", "smartssd"):
        for drives in (1, 2):
            row = find(document["rows"], way=profile, drives=drives, selector="exact", interval=0)
            assert row is not None
            # 2,048 tokens less the window, of two requests, 1 KiB per token in all layers.
            nbytes = 2 * (2048 - 64) * 1024
            least = nbytes / drives / DRIVES[profile].read_bandwidth * SETTINGS.dilation
            assert row["step_s"] > 0.99 * least
    # What comes over a link is read there, but for what frames hold: 3 MiB of 4, at most.
    away = [row for row in document["rows"] if row["place"] == FLEXGEN]
    exact = [row for row in away if row["selector"] == "exact"]
    assert all(0.2 < row["bytes_read"] / row["kv_bytes"] < 1.1 for row in exact)


def test_the_store_writes_whole_blocks_at_the_rate_of_the_drive(document: dict[str, Any]) -> None:
    """A header of 4 KiB, and of four heads pages of K and V: 256 bytes a token, at least 4 KiB."""
    for row in document["writes"]:
        interval = row["interval"]
        pages = 4 * max(1, interval // 16)
        slot = 4096 * (1 + pages)
        assert row["bytes_written"] == slot / interval, row
        assert row["token_bytes"] == 4 * 256
        rate = DRIVES[row["profile"]].write_bandwidth / SETTINGS.dilation
        assert row["write_s"] == pytest.approx(row["bytes_written"] / rate)
        # Beside steps, as long as a step is longer.
        longer = max(row["write_s"], row["step_s"] / 2)
        assert 1 / row["tokens_per_s"] == pytest.approx(longer)
    assert len(document["writes"]) == 2 * len(SETTINGS.intervals)


def test_tables_have_every_case(document: dict[str, Any]) -> None:
    made = {table.title: table for table in tables(document)}
    rows = document["rows"]
    charged = [row for row in rows if row["interval"]]
    assert len(made["Decoding"].rows) == len(rows) - len(charged)
    curve = made["Tokens between two writes, charged to drives that attend"]
    assert len(curve.rows) == len(charged) == 6
    assert len(made["Tokens between two writes, written by the store"].rows) == 6
    parts = [str(row[0]) for row in made["What each part brings"].rows[:4]]
    assert parts[:3] == ["KV over the link", "near storage", "+ write-back every 16"]
    assert parts[3].startswith("+ X-cache, alpha 0.")
    x = made["X-cache: a model with rates of this run"].rows
    # Of two requests: none, one, both, and the best share.
    assert [row[2] for row in x if row[0] == "smartssd"][:3] == [0.0, 0.5, 1.0]
    found = {str(row[0]): row[2] for row in made["The papers' rows here"].rows}
    assert None not in found.values()
    assert " to " in str(found["P19"])
    assert str(found["P4 dense"]).endswith(" of 2")
    for table in made.values():
        assert table.markdown()
