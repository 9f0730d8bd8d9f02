"""Geometry of slots on all stages of a pipeline, each of which knows its own layers only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from vllm_ssdkv.base.errors import SSDKVError, UnsupportedError
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry, with_equal_units

if TYPE_CHECKING:
    from vllm_ssdkv.connector.kv_layout import KVLayout


def of_all_stages(make: Callable[[], KVLayout]) -> tuple[KVLayout, tuple[SlotGeometry, ...]]:
    """This stage's layout, and the geometries of all stages. Blocks until each stage has called it.

    Raises:
        UnsupportedError: the layout of a stage cannot be made, for whatever reason; every stage
            raises it, so that none waits for another one.
    """
    from vllm.distributed import get_pp_group

    group, told = get_pp_group(), ""
    layout: KVLayout | None = None
    cause: Exception | None = None
    try:
        layout = make()
    except Exception as error:  # noqa: BLE001 - the others wait for what this stage says
        cause = error
        told = str(error) if isinstance(error, SSDKVError) else repr(error)
    found: list[tuple[SlotGeometry | None, str]] = [(None, "")] * group.world_size
    mine = None if layout is None else layout.geometry
    torch.distributed.all_gather_object(found, (mine, told), group=group.cpu_group)
    problem = next((text for _, text in found if text), "")
    if layout is None or problem:
        raise UnsupportedError(problem) from cause
    geometries = with_equal_units([one for one, _ in found if one is not None])
    return replace(layout, geometry=geometries[group.rank_in_group]), geometries
