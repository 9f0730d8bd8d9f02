"""Devices whose slots lie elsewhere: what a store asks of whoever moves their bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol
from uuid import UUID

import msgspec

from vllm_ssdkv.store.devices.data_device import OpenDevice
from vllm_ssdkv.store.devices.health import DeviceHealth
from vllm_ssdkv.store.io.engines.protocol import IoEngine
from vllm_ssdkv.store.memory.arena import Arena

ABOUT: Final = "node.json"
"""File in the directory of a device whose slots are elsewhere."""


class AboutStub(msgspec.Struct, frozen=True):
    """Content of :data:`ABOUT`.

    Attributes:
        node: Address of the node.
        drive: Path of the drive there.
        capacity: Bytes that the store may have there.
        shared: Whether the volume there is that of several engines.
    """

    node: str
    drive: str
    capacity: int
    shared: bool = False


@dataclass(frozen=True, slots=True)
class RemoteVolume:
    """Bytes of one device, without its superblocks.

    Attributes:
        path: Directory of the device here.
        name: UUID in its superblocks.
        nbytes: Size.
    """

    path: str
    name: UUID
    nbytes: int


class RemoteDevices(Protocol):
    """Devices whose directories hold superblocks and copies of the manifest, and no slots."""

    def check(self, device: OpenDevice) -> None:
        """Empty a data file, locked and not claimed yet, whose bytes elsewhere are gone: it is then
        made anew. Blocks.

        Raises:
            StoreError: it cannot be found out.
        """

    def open_engine(self, volumes: Sequence[RemoteVolume], arena: Arena) -> IoEngine:
        """Open what the devices have elsewhere, in the order of the devices, and an engine over it.
        Offsets of requests are those of data files. Blocks; once.

        Raises:
            StoreError: it cannot be had.
        """

    def watch(self, health: DeviceHealth) -> None:
        """Tell of devices that are out of reach, and of those that are back, from now on."""


def stub_of(device: Path) -> AboutStub | None:
    """Place of the slots of a device, where it is not in its data files. Blocks on I/O.

    Of data-parallel engines the directory of a device is below the stub.
    """
    for place in (device, device.parent):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode((place / ABOUT).read_bytes(), type=AboutStub)
    return None
