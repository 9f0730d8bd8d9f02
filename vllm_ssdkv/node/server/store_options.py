"""Options of one store of a node: its directories, and its share of memory and drives."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.host import default_capacity
from vllm_ssdkv.base.sizes import GIB, approximate_size
from vllm_ssdkv.config.engine import MIN_CAPACITY, DeviceConfig, SSDKVConfig
from vllm_ssdkv.config.node import NodeConfig
from vllm_ssdkv.node.protocol.messages import StoreSpec
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.manifest import NAME
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry

_DIRECTORY = re.compile("[0-9a-f]{16}")


def geometry_of(spec: StoreSpec, *, encrypted: bool) -> SlotGeometry:
    """Shape of the slots.

    Raises:
        ConfigError: there is no such slot.
    """
    try:
        return SlotGeometry("opaque", spec.layers, 1, 1, spec.payload_bytes, encrypted=encrypted)
    except ValueError as error:
        raise ConfigError(f"an engine asks for a store of slots that cannot be: {error}") from None


def directory_of(spec: StoreSpec) -> str:
    """Name of the store's directory below each device."""
    fingerprint = Fingerprint(spec.fingerprint)
    named = fingerprint.digest + spec.ranks.to_bytes(4, "little") + spec.name.encode()
    return hashlib.blake2b(named, digest_size=8).hexdigest()


def is_directory_of_store(name: str) -> bool:
    """Check whether a directory's name is one of :func:`directory_of`."""
    return _DIRECTORY.fullmatch(name) is not None


def store_options(config: NodeConfig, spec: StoreSpec) -> SSDKVConfig:
    """Options of the store that a spec names. Looks at the devices' free space.

    Raises:
        ConfigError: a device cannot be examined, or the share of it is too small.
    """
    share, directory = config.share_of(spec.model), directory_of(spec)
    devices = []
    for device in config.devices:
        path = Path(device.path) / directory
        budget = device.daily_write_budget
        devices.append(
            DeviceConfig(
                path=str(path),
                capacity=_capacity(device, path, share),
                weight=device.weight,
                tbw=device.tbw,
                daily_write_budget=budget and max(MIN_CAPACITY, int(share * budget)),
            )
        )
    return SSDKVConfig(
        mode="reuse",
        devices=tuple(devices),
        dram_gib=share * config.dram_bytes() / GIB,
        replicas=config.replicas,
        recover=config.recover,
        admission=config.admission,
        encryption=config.encryption,
        io=config.io,
    )


def _capacity(device: DeviceConfig, path: Path, share: float) -> int | None:
    """Bytes that the store may hold on a device; None: as many as it has."""
    if device.capacity is None and (path / NAME).exists():
        return None
    try:
        whole = device.capacity or default_capacity(Path(device.path))
    except OSError as error:
        raise ConfigError(f"device {device.path}: cannot be examined: {error}") from error
    capacity = int(share * whole)
    if capacity < MIN_CAPACITY:
        raise ConfigError(
            f"device {device.path}: a share of {share:g} is {approximate_size(capacity)}, less "
            f"than {approximate_size(MIN_CAPACITY)}: give the device more capacity, or the store a "
            "larger share (store_share, shares)"
        )
    return capacity
