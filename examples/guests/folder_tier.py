"""A tier of your own: a folder with a file for each block.

PYTHONPATH=examples/guests SSDKV_FOLDER=/mnt/blocks vllm serve MODEL --kv-transfer-config '{
  "kv_connector": "SSDKVConnector", "kv_role": "kv_both",
  "kv_connector_extra_config": {"tier": "folder_tier:FolderTier"}}'

It lets nothing go by itself: what was not read for a day is yours to delete, while engines run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


class FolderTier:
    """Keeps blocks as files. See ``vllm_ssdkv.store.guest_tier.Tier``."""

    version = 1

    def __init__(self, name: str, block_bytes: int) -> None:
        self._folder = Path(os.environ["SSDKV_FOLDER"]) / name
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _path(self, key: bytes) -> Path:
        return self._folder / key.hex()

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """See the protocol."""
        return [self._path(key).exists() for key in keys]

    def put(self, key: bytes, block: memoryview) -> None:
        """See the protocol."""
        new = self._path(key).with_suffix(f".{os.getpid()}")
        new.write_bytes(block)
        new.rename(self._path(key))

    def load(self, key: bytes, into: memoryview) -> bool:
        """See the protocol."""
        try:
            with self._path(key).open("rb", buffering=0) as file:
                return file.readinto(into) == len(into)
        except FileNotFoundError:
            return False

    def drop(self, keys: Sequence[bytes]) -> None:
        """See the protocol."""
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def close(self) -> None:
        """See the protocol."""
