"""Findings about GPUDirect Storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_ssdkv.cli.doctor.check_gds import gds
from vllm_ssdkv.cli.doctor.check_result import Level


@pytest.mark.parametrize(
    ("driver", "module", "kvikio", "text", "cure"),
    [
        (False, False, False, "no NVIDIA driver", ""),
        (True, True, True, "nvidia-fs is loaded, kvikio is installed", ""),
        (True, False, True, "nvidia-fs is not loaded; ", "modprobe nvidia-fs"),
        (True, True, False, "the package kvikio is missing", "pip install kvikio-cu12"),
        (True, False, False, "not loaded, the package kvikio", "nvidia-fs; pip install"),
    ],
)
def test_gds(
    tmp_path: Path, driver: bool, module: bool, kvikio: bool, text: str, cure: str
) -> None:
    files = tmp_path / "driver", tmp_path / "module"
    for file, exists in zip(files, (driver, module), strict=True):
        if exists:
            file.touch()
    finding = gds(*files, kvikio)
    assert finding.level is Level.OK, "nothing is wrong without it"
    assert text in finding.text
    assert "does not use it" in finding.text
    assert cure in finding.cure
    assert bool(finding.cure) == bool(cure)
