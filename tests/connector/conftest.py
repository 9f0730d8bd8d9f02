"""Simulations of both modes over one small model's configuration."""

from __future__ import annotations

import pytest
from vllm.config import VllmConfig

from tests.connector.events import Make
from tests.connector.simulation import Simulation, engine_config
from tests.e2e.models import make_llama


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, VllmConfig]:
    model = make_llama(tmp_path_factory.mktemp("model") / "llama", layers=1)
    return {mode: engine_config(model, mode) for mode in ("page", "reuse")}


@pytest.fixture
def page(configs: dict[str, VllmConfig]) -> Make:
    return lambda **options: Simulation(configs["page"], **options)


@pytest.fixture
def reuse(configs: dict[str, VllmConfig]) -> Make:
    return lambda **options: Simulation(configs["reuse"], **options)
