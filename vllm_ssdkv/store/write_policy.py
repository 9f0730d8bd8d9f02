"""Policy of writes to the devices: admission, daily budgets, wear."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.sizes import format_size
from vllm_ssdkv.config.engine import DeviceConfig, SSDKVConfig
from vllm_ssdkv.store.devices.wear import WearLedger
from vllm_ssdkv.store.index.frequency_sketch import FrequencySketch
from vllm_ssdkv.store.open import StorePlace
from vllm_ssdkv.store.placement.placement import Placement

logger = logging.getLogger(__name__)

_SEEN_ENOUGH = 2


class WritePolicy:
    """Says of each block whether it is worth a write. On the scheduler's thread; never blocks."""

    def __init__(
        self,
        config: SSDKVConfig,
        devices: Sequence[DeviceConfig | None],
        wear: WearLedger,
        slot_bytes: Sequence[float],
        num_slots: int,
        counters: Counters,
    ):
        """``devices``: options of each of the store's devices, in its order, which is another one
        than that of the options where a device is missing; None for one that is not written to.
        ``slot_bytes``: what a slot takes on each of them on average, all ranks."""
        self._wear = wear
        self._paths = [None if given is None else str(given.path) for given in devices]
        self._budgets = [None if given is None else given.daily_write_budget for given in devices]
        self._endurance = [None if given is None else given.tbw for given in devices]
        self._slot_bytes = tuple(slot_bytes)
        self._counters = counters
        self._seen = FrequencySketch(num_slots) if config.admission == "second_use" else None
        self._told_on = [-1] * len(devices)

    # ---- admission ----

    def record_access(self, keys: Sequence[bytes]) -> None:
        """A request computes or finds blocks with these distinct keys, for the first time."""
        if self._seen is not None:
            self._seen.add(keys)

    def admitted(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Mask of blocks, [n], that were seen often enough."""
        if self._seen is None:
            return np.ones(len(keys), dtype=np.bool_)
        enough: NDArray[np.bool_] = self._seen.count(keys) >= _SEEN_ENOUGH
        return enough

    # ---- page mode ----

    def should_write(self, keys: Sequence[bytes], slots_under_way: int) -> list[bool]:
        """Mask of blocks, [n], to write although their request may never need them."""
        if self.used_up(slots_under_way):
            return [False] * len(keys)
        wanted: list[bool] = self.admitted(keys).tolist()
        return wanted

    def count_skipped(self, blocks: int, slots_under_way: int) -> None:
        """A request ended with blocks that were not written."""
        if self.used_up(slots_under_way):
            self.skip(blocks, "budget")
        elif self._seen is not None:
            self.skip(blocks, "admission")

    # ---- budgets ----

    def wrote(self, written: Sequence[tuple[int, int]]) -> None:
        """Workers have written (device, bytes)."""
        for device, nbytes in written:
            self._wear.add(device, nbytes)

    def used_up(self, slots_under_way: int) -> bool:
        """Check whether a device has no room in today's budget for another slot.

        Args:
            slots_under_way: Slots whose writes were ordered and not reported yet.
        """
        found = False
        for device, budget in enumerate(self._budgets):
            if budget is None:
                continue
            ordered = (slots_under_way + 1) * self._slot_bytes[device]
            if self._wear.today(device) + ordered > budget:
                self._tell(device, budget)
                found = True
        return found

    def _tell(self, device: int, budget: int) -> None:
        today = self._wear.day()
        if self._told_on[device] != today:
            self._told_on[device] = today
            logger.warning(
                "ssdkv: the daily write budget of %s (%s) is used up: until midnight UTC only what "
                "running requests need is written",
                self._paths[device],
                format_size(budget),
            )

    # ---- numbers and ends ----

    def skip(self, blocks: int, cause: str) -> None:
        """So many blocks are not stored."""
        self._counters.add("stores_skipped", blocks, cause=cause)

    def update_gauges(self, paths: Sequence[str]) -> None:
        """Refresh the gauges; ``paths`` are the devices' labels."""
        for device, path in enumerate(paths):
            written = self._wear.written(device)
            self._counters.set("wear_bytes", float(written), device=path)
            if device >= len(self._budgets):
                continue
            endurance, budget = self._endurance[device], self._budgets[device]
            if endurance is not None:
                self._counters.set("wear_used", written / endurance, device=path)
            if budget is not None:
                share = self._wear.today(device) / budget
                self._counters.set("write_budget_used", share, device=path)

    def close(self) -> None:
        """Write down what was written."""
        self._wear.close()


def open_write_policy(
    place: StorePlace, placement: Placement, num_slots: int, counters: Counters
) -> WritePolicy:
    """Policy of a store that is open, with what was written to its devices so far. Blocks on
    I/O.

    Raises:
        StoreError: the manifest is gone.
    """
    manifest = place.stored()
    # Present devices have their data files by now, since ranks open first. One that went before
    # it had a file has no UUID, and no bytes either.
    names = [device.files[0] or device.path for device in manifest.devices]
    # The placement is that of one rank; the others have as many units, larger or smaller ones.
    units = [one.unit_bytes for one in manifest.geometries]
    bytes_on = [placement.device_bytes(d) * sum(units) for d in range(placement.devices)]
    share = [nbytes / units[0] / max(1, placement.slots) for nbytes in bytes_on]
    given = dict(zip(place.paths, place.config.devices, strict=False))  # none, by default
    devices = [given.get(d.path) if d.present else None for d in manifest.devices]
    wear = WearLedger(place.state, names, counters)
    try:
        return WritePolicy(place.config, devices, wear, share, num_slots, counters)
    except BaseException:
        wear.close()
        raise
