"""Settings of an engine with a tiny model."""

from __future__ import annotations

import pytest
from vllm.config import VllmConfig

from tests.e2e.models import make_llama
from tests.secondary_tier.rig import engine_settings


@pytest.fixture(scope="package")
def settings(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return engine_settings(make_llama(tmp_path_factory.mktemp("model") / "llama", layers=1))
