"""``ssdkv doctor``: memory and huge pages of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from vllm_ssdkv.base.host import available_memory
from vllm_ssdkv.base.sizes import MIB, approximate_size
from vllm_ssdkv.cli.doctor.check_result import Finding, ok, warn

THP: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_LOW_MEMORY: Final = 640 * MIB
"""Bytes of memory below which the DRAM tier's default, a tenth of it, holds few blocks."""


def memory() -> Finding:
    """Memory that the DRAM tier could take."""
    available = available_memory()
    text = f"{approximate_size(available)} available"
    if available < _LOW_MEMORY:
        return warn("memory", text, "free some, or set dram_gib")
    return ok("memory", text)


def huge_pages(setting: Path = THP) -> Finding:
    """Transparent huge pages, which the buffers ask for with madvise."""
    try:
        text = setting.read_text().strip()
    except OSError:
        text = ""
    chosen = text.partition("[")[2].partition("]")[0] or "not supported"
    if chosen in {"always", "madvise"}:
        return ok("huge pages", chosen)
    return warn("huge pages", chosen, f"as root: echo madvise > {THP}")


def host() -> list[Finding]:
    """Everything about this machine but its devices."""
    return [memory(), huge_pages()]
