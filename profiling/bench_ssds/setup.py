"""The devices that are measured: virtual SSDs, throttled RAM disks, or twins inside our engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.config.io_engine import ThrottleRule
from vllm_ssdkv.profiling.bench_io.model import DeviceModel
from vllm_ssdkv.profiling.vssd.ssds import DEFAULT_FOLDER, Ssds, ssds

Kind: TypeAlias = Literal["fuse", "loop", "twin"]

CAPACITY = 768 * MIB
"""Capacity of each device; it becomes used memory only where something is written."""


@dataclass(slots=True)
class Setup:
    """Devices and how to slow one of them down.

    Attributes:
        kind: What they are.
        model: How fast each is.
        directories: One per device; of twins, one in all.
        devices: Their number.
    """

    kind: Kind
    model: DeviceModel
    directories: list[Path]
    devices: int
    _ssds: Ssds | None
    _slow: dict[int, DeviceModel]

    @contextmanager
    def slow(self, device: int, factor: float) -> Iterator[None]:
        """One device is ``factor`` times slower inside the context.

        Raises:
            BenchError: the device does not take it.
        """
        model = self.model.slower(factor)
        self._slow[device] = model
        if self._ssds is not None:
            self._ssds.slow_down(device, model)
        try:
            yield
        finally:
            del self._slow[device]
            if self._ssds is not None:
                self._ssds.slow_down(device, self.model)

    @property
    def rules(self) -> tuple[ThrottleRule, ...]:
        """Rules for the engines: everything for twins, nothing for devices that are slow."""
        if self.kind != "twin":
            return ()
        return (*(m.rule(d) for d, m in self._slow.items()), self.model.rule())

    def sum_of_devices(self, nbytes: int, devices: int | None = None) -> float:
        """Bytes per second that the devices can do together with requests of ``nbytes``."""
        models = [self._slow.get(d, self.model) for d in range(devices or self.devices)]
        return sum(model.bytes_per_s(nbytes) for model in models)

    def raid0(self) -> Path:
        """RAID-0 over all devices, see :meth:`Ssds.raid0`.

        Raises:
            BenchError: it cannot be made here; twins have none.
        """
        if self._ssds is None:
            raise BenchError("twins exist inside our engines only: no file system lies on them")
        return self._ssds.raid0(self.directories)


@contextmanager
def make_setup(
    kind: Kind, devices: int, model: DeviceModel, place: Path, folder: Path = DEFAULT_FOLDER
) -> Iterator[Setup]:
    """Devices that are gone at the end.

    Args:
        kind: Virtual SSDs and RAM disks need root, twins nothing.
        devices: How many.
        model: How fast each is.
        place: Directory for the files of twins.
        folder: Where devices are made.

    Raises:
        BenchError: they cannot be made here.
    """
    if kind == "twin":
        yield Setup(kind, model, [place], devices, None, {})
        return
    with ssds(kind, devices, CAPACITY, model, folder) as (made, directories):
        yield Setup(kind, model, directories, devices, made, {})
