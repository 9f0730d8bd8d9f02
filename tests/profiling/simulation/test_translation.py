"""Maps of a drive's flash: nothing is lost, and what order of writes costs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.profiling.simulation.translation import Translation

PAGES = {"tokens": 96, "channels": 48}


def made() -> Translation:
    return Translation(blocks=20, block_pages=16, logical=PAGES)


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(PAGES)), st.integers(0, 47), st.booleans()), max_size=900
    )
)
def test_each_page_lies_at_one_place_and_no_two_at_the_same(
    deeds: list[tuple[str, int, bool]],
) -> None:
    ftl, alive = made(), set()
    for name, page, kept in deeds:
        if kept:
            ftl.write(name, [page])
            alive.add((name, page))
        else:
            ftl.trim(name, [page])
            alive.discard((name, page))
    places = {}
    for name, pages in PAGES.items():
        for page in range(pages):
            place = ftl.place(name, page)
            assert (place is not None) == ((name, page) in alive)
            if place is not None:
                places[name, page] = place
    assert len(set(places.values())) == len(places)
    # The maps do not share blocks: what is given up together is erased together.
    of = {name: {place[0] for key, place in places.items() if key[0] == name} for name in PAGES}
    assert not of["tokens"] & of["channels"]
    counts = ftl.counts
    assert counts.programmed >= counts.written == sum(kept for _, _, kept in deeds)


def test_whole_slots_in_turn_cost_no_second_write_and_single_rows_do() -> None:
    """The product writes slots of whole blocks: the oldest block is stale when its turn comes."""
    turn, rows = made(), made()
    source = random.Random(1)
    for ftl in (turn, rows):
        for name, pages in PAGES.items():
            ftl.write(name, range(pages))
    for _ in range(60):
        for name, pages in PAGES.items():
            turn.write(name, range(pages))
            rows.write(name, (source.randrange(pages) for _ in range(pages)))
    assert turn.counts.write_amplification == pytest.approx(1, abs=0.01)
    assert rows.counts.write_amplification > 1.15
    assert rows.counts.erases > turn.counts.erases


def test_more_spare_flash_means_less_to_write_again() -> None:
    found = []
    for blocks in (16, 20, 32):
        ftl, source = Translation(blocks, 16, PAGES), random.Random(2)
        for _ in range(4000):
            ftl.write("tokens", [source.randrange(96)])
            ftl.write("channels", [source.randrange(48)])
        found.append(ftl.counts.write_amplification)
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1] > 1


def test_ranges_that_end_are_erased_in_idle_time() -> None:
    ftl = made()
    for name, pages in PAGES.items():
        ftl.write(name, range(pages))
    ftl.reclaim()
    assert ftl.counts.idle_erases == 0  # all is live
    ftl.trim("channels", range(40))
    ftl.reclaim()
    # Blocks of 16 pages: two are empty, one has eight live ones, and stays.
    assert (ftl.counts.idle_erases, ftl.counts.erases) == (2, 0)
    assert [ftl.place("channels", page) is None for page in (39, 40)] == [True, False]
    ftl.write("channels", range(40))
    assert ftl.counts.write_amplification == 1


@pytest.mark.parametrize(
    ("blocks", "pages", "logical", "text"),
    [
        (5, 16, {"a": 10, "b": 10, "c": 10}, "got 5 blocks for 3 maps; give more than 5"),
        (8, 0, {"a": 1}, "got 0 pages a block"),
        (8, 16, {}, "maps {}; at least 1"),
    ],
)
def test_flash_that_cannot_be(blocks: int, pages: int, logical: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Translation(blocks, pages, logical)


def test_flash_that_is_full_says_so() -> None:
    ftl = Translation(4, 4, {"a": 100})
    with pytest.raises(ConfigError, match="full of live pages"):
        ftl.write("a", range(100))
    assert ftl.counts.programmed == ftl.counts.written == 16
