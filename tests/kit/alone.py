"""Processes that find the tests beside the package as it is installed, not beside its sources."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).parents[1]


def environment_with_tests(folder: Path) -> dict[str, str]:
    """Environment for ``python -P``, in which ``tests`` can be imported.

    The sources must not hide what is installed: only there are the native modules.

    Args:
        folder: Gets a directory that has the tests, and nothing else.
    """
    alone = folder / "alone"
    alone.mkdir(exist_ok=True)
    link = alone / TESTS.name
    if not link.is_symlink():
        link.symlink_to(TESTS)
    return {**os.environ, "PYTHONPATH": str(alone)}
