#!/usr/bin/env python3
"""Make an environment with the newer vLLM of requirements/newer.lock, and print its interpreter.

The newer release has no build for CPUs yet. So its Python comes from the package index, its
compiled parts are links to those of the installed CPU build, and every other package is the one of
the environment that runs this. It lies in build/, and is made once for each lock. Where the index
does not give the packages, it ends with status 75, which tells a caller to try later.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements" / "newer.lock", ROOT / "requirements" / "cpu.lock"
SITE = Path(sysconfig.get_path("purelib"))
DOWNLOAD_S = 600
LEFT_OUT = {".so", ".h", ".hpp", ".cuh", ".cu", ".inl", ""}
"""Suffixes of what is compiled for GPUs, or compiles for them: 800 of 900 MB."""


def fetch(requirement: str, folder: Path) -> Path:
    """Download one wheel with pip.

    Raises:
        SystemExit: the package index does not give it, or takes too long for it.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), requirement]
    try:
        ended = subprocess.run(
            command, stderr=subprocess.PIPE, text=True, check=False, timeout=DOWNLOAD_S
        )
        why = ended.stderr.strip()[-2000:] if ended.returncode else ""
    except subprocess.TimeoutExpired:
        why = f"not in {DOWNLOAD_S} s"
    if why:
        sys.stderr.write(
            f"newer_vllm: {requirement} cannot be had from the package index, which has to be "
            f"reachable once: {why}\n"
        )
        raise SystemExit(os.EX_TEMPFAIL)
    (wheel,) = folder.glob(f"{requirement.partition('==')[0]}-*.whl")
    return wheel


def unpack(wheel: Path, site: Path) -> None:
    """Put the Python of a vLLM wheel over the compiled parts that are installed."""
    version = wheel.name.split("-")[1]
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if Path(name).suffix not in LEFT_OUT]
        archive.extractall(site, [name for name in names if name.startswith("vllm/")])
    for library in (SITE / "vllm").rglob("*.so"):
        (site / library.relative_to(SITE)).symlink_to(library)
    # vLLM knows by its version that it runs on a CPU.
    metadata = site / f"vllm-{version}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def make(place: Path, requirements: list[str]) -> None:
    """Make the environment in ``place``, which is removed first."""
    shutil.rmtree(place, ignore_errors=True)
    venv.create(place, symlinks=True)
    (site,) = place.glob("lib/python*/site-packages")
    with tempfile.TemporaryDirectory(dir=place) as folder:
        for requirement in requirements:
            wheel = fetch(requirement, Path(folder))
            if requirement.startswith("vllm=="):
                unpack(wheel, site)
            else:
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(site)
    # After this folder itself: what is in both is taken from here.
    (site / "installed.pth").write_text(f"import site; site.addsitedir({str(SITE)!r})\n")


def main() -> None:
    requirements = [
        line for line in LOCKS[0].read_text().splitlines() if line and not line.startswith("#")
    ]
    place = ROOT / "build" / "newer-vllm"
    stamp = place / "made-of"
    parts = [SITE.as_posix().encode(), *(lock.read_bytes() for lock in LOCKS)]
    wanted = hashlib.sha256(b"\0".join(parts)).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        make(place, requirements)
        stamp.write_text(wanted)
    sys.stdout.write(f"{place / 'bin' / 'python'}\n")


if __name__ == "__main__":
    main()
