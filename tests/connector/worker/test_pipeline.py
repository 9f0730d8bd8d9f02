"""A pipeline's stages tell each other their geometry, or why there is none."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import vllm.distributed

from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.connector.kv_layout import KVLayout
from vllm_ssdkv.connector.worker.pipeline import of_all_stages
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
