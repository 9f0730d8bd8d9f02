"""Build backend: scikit-build-core's, with editable installs that leave bare names alone.

Its editable wheel redirects imports of `vllm_ssdkv` to the sources, and also puts the folders above
them on `sys.path`. There, vLLM and others look for modules called `triton_kernels` and `profiling`,
and would find ours. The redirect needs no such entry, so it is left out here.
"""

import base64
import hashlib
import zipfile
from pathlib import Path
from typing import Any

from scikit_build_core import build as backend
from scikit_build_core.build import (
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the editable wheel in `wheel_directory`; returns its file name."""
    name = backend.build_editable(wheel_directory, config_settings, metadata_directory)
    keep_imports_only(Path(wheel_directory) / name)
    return name


def keep_imports_only(wheel: Path) -> None:
    """Remove the `sys.path` entries of every .pth file in `wheel`, and correct its RECORD."""
    with zipfile.ZipFile(wheel) as archive:
        files = {info.filename: archive.read(info) for info in archive.infolist()}
    (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    rows = {row.split(",")[0]: row for row in files[record].decode().splitlines()}
    for name, content in list(files.items()):
        if name.endswith(".pth"):
            lines = [line for line in content.splitlines() if line.startswith(b"import ")]
            files[name] = b"".join(line + b"\n" for line in lines)
            rows[name] = record_of(name, files[name])
    files[record] = "".join(f"{row}\n" for row in rows.values()).encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def record_of(name: str, content: bytes) -> str:
    """Row of RECORD for a file: name, digest and size, as the wheel format has them."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}"
