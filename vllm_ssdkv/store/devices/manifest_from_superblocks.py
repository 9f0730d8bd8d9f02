"""A store's identity from the superblocks of its data files, when no manifest is left."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

from vllm_ssdkv.base.errors import FormatError
from vllm_ssdkv.base.host import is_block_device
from vllm_ssdkv.store.devices.data_file import peek_superblock
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.manifest import Manifest, ManifestDevice
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.format.superblock import KEY_ID_BYTES, Superblock, data_file_path


def rebuilt(
    paths: Sequence[str],
    fingerprint: Fingerprint,
    geometries: Sequence[SlotGeometry],
    key_id: bytes,
) -> Manifest:
    """A manifest with the store's name and its data files, and without segments. Blocks on I/O.

    Where slots lay was in the manifest alone: whoever saves this one must have all of them dropped.
    A device that does not answer, or holds no data file, is in it without a name.

    Args:
        paths: Directories or block devices.
        fingerprint: What the KV belongs to.
        geometries: Shape of the slots of each rank, which has a data file on every device.
        key_id: As in the superblock; empty where the store is not encrypted.

    Raises:
        FormatError: there is no superblock, one is damaged, or two are of different stores.
        FingerprintMismatchError: they are of another model or layout.
    """
    manifest = Manifest.create(fingerprint, geometries, key_id=key_id)
    first: tuple[UUID, Path] | None = None
    for path in paths:
        place = Path(path)
        device = ManifestDevice(path=path, capacity=0, weight=0, files=[""] * len(geometries))
        raw = is_block_device(path)
        for rank, geometry in enumerate(geometries[:1] if raw else geometries):
            file = place if raw else data_file_path(place, rank)
            try:
                block = peek_superblock(file)
            except OSError:
                continue  # whoever looks at the devices next says what is wrong with this one
            if block is None:
                continue
            expected = Superblock(
                store=block.store if first is None else first[0],
                device=block.device,
                rank=rank,
                unit_bytes=geometry.unit_bytes,
                epoch=block.epoch,
                geometry=geometry,
                fingerprint=fingerprint,
                key_id=key_id or bytes(KEY_ID_BYTES),
            )
            block.require(expected, str(file))
            first = first or (block.store, file)
            device.files[rank] = str(block.device)
            device.capacity += 0 if raw else os.stat(file).st_size
        manifest.devices.append(device)
    if first is None:
        raise FormatError(f"there is no superblock on {', '.join(paths)}")
    manifest.store = str(first[0])
    return manifest
