"""Keys that tests of nodes share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm_ssdkv.node.protocol.credentials import make_keys


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with keys of both sides."""
    directory = tmp_path_factory.mktemp("keys")
    make_keys(directory, 2)
    return directory


@pytest.fixture
def node_seconds() -> float:
    """Seconds of hostile frames: SSDKV_SOAK_NODE_S (`make soak`), or a moment."""
    return float(os.environ.get("SSDKV_SOAK_NODE_S", "1.5"))
