"""One rank's part of a store that is open."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from vllm_ssdkv.base.sizes import approximate_size
from vllm_ssdkv.store.devices.data_device import OpenDevice
from vllm_ssdkv.store.io.device_prober import Identity
from vllm_ssdkv.store.io.slot_io import SlotIO
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.memory.memory_plan import MemoryPlan


@dataclass(frozen=True, slots=True)
class OpenStore:
    """One rank's open data files, engine and memory."""

    files: SlotIO
    devices: tuple[OpenDevice, ...]
    arena: Arena
    plan: MemoryPlan
    num_slots: int
    """Slot numbers are below this."""
    capacities: tuple[int, ...]
    identities: Mapping[int, Identity]
    """Devices whose superblocks are in their data files here, by number."""
    key_id: bytes
    worker: int
    """Number of the worker."""
    reads_only: bool
    """True if another worker writes the data files."""

    def describe(self) -> list[str]:
        """Lines of the start-up summary."""
        slot = self.files.geometry.slot_bytes
        lines = [
            f"SSD  {device.path.parent}: up to {approximate_size(capacity)}"
            f"{'' if device.direct else ', page cache in use (no O_DIRECT)'}"
            f"{'' if device.preallocated else ', not preallocated'}"
            for device, capacity in zip(self.devices, self.capacities, strict=True)
        ]
        staging = self.plan.staging_bytes
        return [
            f"DRAM {approximate_size(self.plan.nbytes)} per rank: {self.plan.frames} blocks"
            f"{f', {approximate_size(staging)} staging' if staging else ''}{self._choice()}",
            *lines,
            f"store {self.files.placement.slots} blocks of {approximate_size(slot)} per rank"
            f"{', each of them twice' if self.files.placement.most_copies > 1 else ''}, engine "
            f"{self.files.engine.name}",
            self._encryption(),
        ]

    def _encryption(self) -> str:
        if not self.key_id:
            return "encryption off"
        from vllm_ssdkv.store.integrity.cipher import libcrypto_version

        return f"encryption AES-256-GCM ({libcrypto_version()}), key id {self.key_id.hex()}"

    def _choice(self) -> str:
        if not self.plan.page_places:
            return ""
        return (
            f", {self.plan.page_places} single pages, summaries of {self.plan.summary_rows} blocks"
        )

    def close(self) -> None:
        """End the engine, and release memory, data files and their locks. The store's threads, if
        there were any, must have ended. Memory that an I/O may still touch is leaked."""
        with ExitStack() as stack:
            for device in self.devices:
                stack.callback(device.close)
            # Its descriptors are duplicates: a lock lasts until it is closed, too.
            if self.files.engine.close(0.0):
                self.arena.close()
