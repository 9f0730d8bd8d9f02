"""Attention without a step: zeros where vLLM runs without requests, an error where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_ssdkv.base.errors import StepError
from vllm_ssdkv.connector import active_worker
from vllm_ssdkv.connector.attention_backend import PagedAttentionImpl, PagedMetadata

TOKENS = 3


@pytest.fixture(autouse=True)
def nobody() -> Iterator[None]:
    before = active_worker.worker()
    active_worker.set_worker(None)
    yield
    active_worker.set_worker(before)


def metadata(*places: int) -> PagedMetadata:
    """Of a batch with these places in the KV cache."""
    return PagedMetadata(
        torch.tensor([0, len(places)]),
        torch.tensor([len(places)]),
        torch.zeros((1, 1), dtype=torch.int32),
        torch.tensor(places),
        len(places),
    )


def attend(given: PagedMetadata | None) -> torch.Tensor:
    impl = PagedAttentionImpl(4, 32, 1.0, 2)
    query, new = torch.ones(TOKENS, 4, 32), torch.ones(TOKENS, 2, 32)
    layer: Any = SimpleNamespace(layer_name="layers.0")
    output = torch.full((TOKENS, 4, 32), torch.nan)
    return impl.forward(layer, query, new, new, torch.zeros(0), given, output)


def serve(*, began: bool) -> None:
    worker: Any = SimpleNamespace(step=None, began=began, projector=None)
    active_worker.set_worker(worker)


def test_runs_of_vllm_without_requests_get_zeros() -> None:
    assert (attend(None) == 0).all()
    for began in (False, True):
        serve(began=began)
        assert (attend(None) == 0).all()
        assert (attend(metadata(-1, -1, -1)) == 0).all()  # padding


def test_vllms_warm_up_with_requests_of_its_own_gets_zeros() -> None:
    serve(began=False)
    assert (attend(metadata(16, 17, 18)) == 0).all()


@pytest.mark.parametrize("worker", [False, True])
def test_requests_without_a_step_are_an_error(worker: bool) -> None:
    if worker:
        serve(began=True)
    with pytest.raises(StepError, match=r"layers\.0: .* without a step of SSDKVConnector"):
        attend(metadata(16, 17, 18))
