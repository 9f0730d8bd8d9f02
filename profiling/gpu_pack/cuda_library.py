"""vLLM's compiled operators for CUDA, as they travel to a GPU machine.

    python -P -m vllm_ssdkv.profiling.gpu_pack.cuda_library CACHE TARGET

Takes one member out of vLLM's published wheel, which pip downloads, keeps it in the folder CACHE,
and writes it to TARGET with the device code of all GPUs but Hopper blanked.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
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
_PIP: Final = ("-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps")
_WHEEL: Final = ("--only-binary=:all:", "--platform=manylinux_2_28_x86_64", "--python-version=3.12")
_DOWNLOAD_S: Final = 1800
"""The wheel has 330 MB."""


def needs() -> list[str]:
    """The list in :data:`NEEDS`."""
    return NEEDS.read_text(encoding="utf-8").split()


def of_torch(symbols: list[str]) -> list[str]:
    """Symbols of PyTorch's stable interface among those that a library needs."""
    return [name for name in symbols if name.startswith(("aoti_torch_", "torch_"))]


def _download() -> bytes:
    """The library out of the published wheel."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *_PIP, *_WHEEL, "--dest", folder, f"vllm=={VERSION}"]
        subprocess.run(command, check=True, timeout=_DOWNLOAD_S)
        (wheel,) = Path(folder).iterdir()
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(f"vllm/{LIBRARY}")


def original(cache: Path) -> bytes:
    """The library as published, from ``cache`` if it is there.

    Raises ``BenchError`` if it is another one than that of :data:`VERSION`.
    """
    kept = cache / f"vllm-{VERSION}-{LIBRARY}"
    library = kept.read_bytes() if kept.exists() else _download()
    if hashlib.sha256(library).hexdigest() != _SHA256:
        raise BenchError(f"{kept if kept.exists() else f'vllm {VERSION}'} has another {LIBRARY}")
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
