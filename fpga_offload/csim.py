"""Backend ``csim``: the HLS kernels as a C++ library, which is built with the package."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

from vllm_ssdkv.base.errors import FpgaError
from vllm_ssdkv.fpga_offload.description import KernelShape
from vllm_ssdkv.fpga_offload.library import LibraryBackend

_PORTABLE = "libssdkv_csim.so"
_AVX2 = "libssdkv_csim_avx2.so"


def library_path() -> Path:
    """File of the library that suits this CPU; the package's native modules lie beside it.

    Raises:
        FpgaError: there is none.
    """
    native = importlib.util.find_spec("vllm_ssdkv._io")
    folder = Path(native.origin).parent if native and native.origin else Path(__file__).parent
    for name in (_AVX2, _PORTABLE) if _has_avx2() else (_PORTABLE,):
        if (folder / name).is_file():
            return folder / name
    raise FpgaError(
        f"the kernels of the backend csim are not installed: {folder / _PORTABLE} is missing; "
        "reinstall the package"
    )


@functools.cache
def _has_avx2() -> bool:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return {"avx2", "fma"} <= set(flags.split())


class CsimBackend(LibraryBackend):
    """See ``Backend``.

    Example:
        backend = CsimBackend(KernelShape(128, 4, "bfloat16"))
    """

    def __init__(self, shape: KernelShape) -> None:
        """Open kernels of a shape.

        Raises:
            FpgaError: the library cannot be loaded.
            FpgaVersionError: it is of another version.
        """
        super().__init__("csim", library_path(), shape)
