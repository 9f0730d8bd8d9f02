"""Starts of ranks that need each other: stages of a pipeline, and ranks that share data files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch

from vllm_ssdkv.base.errors import SSDKVError, StoreError, UnsupportedError
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry, with_equal_units

if TYPE_CHECKING:
    from vllm_ssdkv.connector.kv_layout import KVLayout

T = TypeVar("T")


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


def of_sharers(open_files: Callable[[], T]) -> T:
    """Open data files that the tensor-parallel ranks share: the first rank, which writes, does it
    before the others. Blocks until it has.

    Raises:
        StoreError: the first rank could not; what ``open_files`` raises, it raises there.
    """
    from vllm.distributed import get_tp_group

    group, told = get_tp_group(), [""]
    if group.rank_in_group == 0:
        try:
            return open_files()
        except BaseException as error:
            told = [str(error) or repr(error)]
            raise
        finally:
            torch.distributed.broadcast_object_list(told, group.ranks[0], group=group.cpu_group)
    torch.distributed.broadcast_object_list(told, group.ranks[0], group=group.cpu_group)
    if told[0]:
        raise StoreError(told[0])
    return open_files()
