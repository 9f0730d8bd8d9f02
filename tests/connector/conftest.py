"""Simulations of both modes over one small model's configuration."""

from __future__ import annotations

import pytest
from vllm.config import VllmConfig

from tests.connector.events import EXACT_BELOW, Make
from tests.connector.simulation import Simulation, engine_config
from tests.e2e.models import make_llama


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, VllmConfig]:
    model = make_llama(tmp_path_factory.mktemp("model") / "llama", layers=1)
    made = {mode: engine_config(model, mode) for mode in ("page", "reuse")}
    sparse = {"exact_below": EXACT_BELOW}
    return made | {"sparse": engine_config(model, "page", selector="bounds", sparse=sparse)}


@pytest.fixture
def sparse(configs: dict[str, VllmConfig]) -> Make:
    """Page mode whose requests choose from ``EXACT_BELOW`` tokens on."""
    return lambda **options: Simulation(configs["sparse"], **options)


@pytest.fixture
def page(configs: dict[str, VllmConfig]) -> Make:
    return lambda **options: Simulation(configs["page"], **options)


@pytest.fixture
def reuse(configs: dict[str, VllmConfig]) -> Make:
    return lambda **options: Simulation(configs["reuse"], **options)
