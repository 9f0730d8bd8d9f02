"""``ssdkv doctor``: GPUDirect Storage, by which drives reach the memory of a GPU directly."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

from vllm_ssdkv.cli.doctor.check_result import Finding, Level, ok

DRIVER: Final = Path("/proc/driver/nvidia/version")
MODULE: Final = Path("/proc/driver/nvidia-fs/version")
_NAME: Final = "GPUDirect Storage"
_UNUSED: Final = "this version does not use it: bytes go through the memory of the host"


def gds(driver: Path = DRIVER, module: Path = MODULE, kvikio: bool | None = None) -> Finding:
    """Check whether NVIDIA's kernel module and the library for it are there.

    Nothing is wrong without them while stores do not read into the memory of GPUs, so there is no
    warning; who wants to measure with the engine kvikio is told what is missing.

    Args:
        driver: Exists where NVIDIA's driver is loaded.
        module: Exists where ``nvidia-fs`` is loaded, too.
        kvikio: Whether the package kvikio is installed; None: look.
    """
    if not driver.exists():
        return ok(_NAME, f"no NVIDIA driver, so none; {_UNUSED}")
    if kvikio is None:
        kvikio = importlib.util.find_spec("kvikio") is not None
    missing, cures = [], []
    if not module.exists():
        missing.append("the kernel module nvidia-fs is not loaded")
        cures.append("install nvidia-gds and modprobe nvidia-fs")
    if not kvikio:
        missing.append("the package kvikio is missing")
        cures.append("pip install kvikio-cu12")
    state = ", ".join(missing) or "nvidia-fs is loaded, kvikio is installed"
    cure = f"to try it all the same: {'; '.join(cures)}" if cures else ""
    return Finding(_NAME, Level.OK, f"{state}; {_UNUSED}", cure)
