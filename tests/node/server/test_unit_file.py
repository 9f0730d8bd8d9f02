"""The unit file of a node is one that systemd takes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from vllm_ssdkv.config.node import NodeConfig

UNIT = Path(__file__).parents[3] / "packaging" / "systemd" / "ssdkv-node.service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_takes_it() -> None:
    found = subprocess.run(
        ["systemd-analyze", "verify", str(UNIT)], capture_output=True, text=True, check=False
    )
    said = [line for line in found.stderr.splitlines() if "ssdkv" in line]
    assert (found.returncode, said) == (0, [])


def test_time_to_stop_is_longer_than_a_drain() -> None:
    (seconds,) = [
        int(line.partition("=")[2])
        for line in UNIT.read_text().splitlines()
        if line.startswith("TimeoutStopSec=")
    ]
    config = NodeConfig.from_options({"listen": ["unix:///s"], "devices": ["/d"]})
    assert seconds > config.drain + 2 * config.lease
