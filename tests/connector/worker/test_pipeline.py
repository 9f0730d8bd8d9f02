"""Ranks that need each other at the start tell each other what they have, or why there is none."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import vllm.distributed

from vllm_ssdkv.base.errors import StoreError, UnsupportedError
from vllm_ssdkv.connector.kv_layout import KVLayout
from vllm_ssdkv.connector.worker.pipeline import of_all_stages, of_sharers
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry, with_equal_units

LARGE, SMALL = (SlotGeometry("opaque", n, 1, 1, 400_000) for n in (9, 2))

Told = tuple[SlotGeometry | None, str]


def stage(layers: int) -> KVLayout:
    geometry = SMALL if layers == 2 else LARGE
    return KVLayout(("a",) * layers, 16, 1, 8, torch.float32, geometry, 2, 8)


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> Callable[[Told], list[Told]]:
    """This process is the second of two stages; the first one says so much, and hears the rest."""

    def of(first: Told) -> list[Told]:
        heard: list[Told] = []

        def gather(found: list[Told], mine: Told, group: object) -> None:
            heard.append(mine)
            found[:] = [first, mine]

        pair = SimpleNamespace(world_size=2, rank_in_group=1, cpu_group=None)
        monkeypatch.setattr(vllm.distributed, "get_pp_group", lambda: pair)
        monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
        return heard

    return of


def test_all_stages_have_as_many_units(second: Callable[[Told], list[Told]]) -> None:
    heard = second((LARGE, ""))
    layout, geometries = of_all_stages(lambda: stage(2))
    assert geometries == with_equal_units([LARGE, SMALL])
    assert layout.geometry == geometries[1]
    assert heard == [(SMALL, "")]


@pytest.mark.parametrize(
    ("error", "said"),
    [(UnsupportedError("no"), "no"), (ValueError("zero"), "ValueError('zero')")],
)
def test_a_stage_that_fails_tells_the_others(
    error: Exception, said: str, second: Callable[[Told], list[Told]]
) -> None:
    def fails() -> KVLayout:
        raise error

    heard = second((LARGE, ""))
    with pytest.raises(UnsupportedError) as caught:
        of_all_stages(fails)
    assert str(caught.value) == said
    assert heard == [(None, said)]


def test_what_another_stage_says_is_raised_here(second: Callable[[Told], list[Told]]) -> None:
    second((None, "no layers"))
    with pytest.raises(UnsupportedError, match=r"^no layers$"):
        of_all_stages(lambda: stage(2))


@pytest.fixture
def sharer(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str], list[str]]:
    """This process is one of two ranks that share files; the first one says so much."""

    def of(rank: int, said: str) -> list[str]:
        done: list[str] = []

        def broadcast(told: list[str], source: int, group: object) -> None:
            assert source == 6
            if rank:
                told[:] = [said]
            done.append(told[0])

        pair = SimpleNamespace(ranks=[6, 7], rank_in_group=rank, cpu_group=None)
        monkeypatch.setattr(vllm.distributed, "get_tp_group", lambda: pair)
        monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast)
        return done

    return of


@pytest.mark.parametrize(("rank", "order"), [(0, ["open", ""]), (1, ["", "open"])])
def test_the_first_rank_opens_shared_files_before_the_others(
    rank: int, order: list[str], sharer: Callable[[int, str], list[str]]
) -> None:
    done = sharer(rank, "")
    of_sharers(lambda: done.append("open"))
    assert done == order


def test_shared_files_that_the_first_rank_cannot_open(
    sharer: Callable[[int, str], list[str]],
) -> None:
    def fails() -> None:
        raise StoreError("in use")

    told = sharer(0, "")
    with pytest.raises(StoreError, match=r"^in use$"):
        of_sharers(fails)
    assert told == ["in use"]
    sharer(1, "in use")
    with pytest.raises(StoreError, match=r"^in use$"):
        of_sharers(lambda: pytest.fail("opened"))
