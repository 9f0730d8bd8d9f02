"""vLLM's compiled operators for CUDA, as they travel to a GPU machine.

    python -P -m vllm_ssdkv.profiling.gpu_pack.cuda_library CACHE TARGET

Takes one member out of vLLM's published wheel by range requests, keeps it in the folder CACHE, and
writes it to TARGET with the device code of all GPUs but Hopper blanked.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import urllib.request
import zipfile
from pathlib import Path
from typing import Final

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.gpu_pack.fatbin import blank_others, needed_symbols

VERSION: Final = "0.32.0"
LIBRARY: Final = "_C_stable_libtorch.abi3.so"
ARCHITECTURE: Final = 90

NEEDS: Final = Path(__file__).with_name("vllm_needs.txt")
"""Symbols of PyTorch that the library needs, one per line."""

_SHA256: Final = "ae9c8a293020e422e0b6b61d1024263dc476a772337f5d39d46d18baa7ce0ad9"
_INDEX: Final = "https://pypi.org/simple/vllm/"
_WHEEL: Final = f"vllm-{VERSION}-cp38-abi3-manylinux_2_28_x86_64.whl"
_REQUEST_S: Final = 120
_READ_BYTES: Final = 8 << 20


def needs() -> list[str]:
    """The list in :data:`NEEDS`."""
    return NEEDS.read_text(encoding="utf-8").split()


def of_torch(symbols: list[str]) -> list[str]:
    """Symbols of PyTorch's stable interface among those that a library needs."""
    return [name for name in symbols if name.startswith(("aoti_torch_", "torch_"))]


class _RemoteFile(io.RawIOBase):
    """A file on a server that answers range requests."""

    def __init__(self, url: str, size: int):
        super().__init__()
        self._url = url
        self._size = size
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        end = min(self._size, self._at + len(buffer))
        if end <= self._at:
            return 0
        request = urllib.request.Request(
            self._url, headers={"Range": f"bytes={self._at}-{end - 1}"}
        )
        with urllib.request.urlopen(request, timeout=_REQUEST_S) as answer:
            data = answer.read(end - self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _download() -> bytes:
    """The library out of the wheel on PyPI."""
    asked = urllib.request.Request(
        _INDEX, headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(asked, timeout=_REQUEST_S) as answer:
        files = json.load(answer)["files"]
    wheel = next((file for file in files if file["filename"] == _WHEEL), None)
    if wheel is None:
        raise BenchError(f"{_INDEX} does not list {_WHEEL}")
    remote = io.BufferedReader(_RemoteFile(wheel["url"], wheel["size"]), _READ_BYTES)
    with zipfile.ZipFile(remote) as archive:
        return archive.read(f"vllm/{LIBRARY}")


def original(cache: Path) -> bytes:
    """The library as published, from ``cache`` if it is there.

    Raises ``BenchError`` if it is another one than that of :data:`VERSION`.
    """
    kept = cache / f"vllm-{VERSION}-{LIBRARY}"
    library = kept.read_bytes() if kept.exists() else _download()
    if hashlib.sha256(library).hexdigest() != _SHA256:
        raise BenchError(f"{kept if kept.exists() else _WHEEL} has another {LIBRARY}")
    if not kept.exists():
        cache.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(".part")
        partial.write_bytes(library)
        partial.rename(kept)
    return library


def main() -> None:
    """Write the blanked library; ends with a message if it needs other symbols than the list."""
    cache, target = map(Path, sys.argv[1:])
    library = original(cache)
    if of_torch(needed_symbols(library)) != needs():
        raise SystemExit(f"pack: {LIBRARY} needs other symbols of PyTorch than {NEEDS.name} says")
    target.write_bytes(blank_others(library, ARCHITECTURE))


if __name__ == "__main__":
    main()
