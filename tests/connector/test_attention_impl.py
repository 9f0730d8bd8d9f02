"""Attention without a step: zeros where vLLM runs without requests, an error where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_ssdkv.base.errors import StepError
from vllm_ssdkv.connector import active_worker
from vllm_ssdkv.connector.attention_impl import (
    PagedAttentionImpl,
    PagedMetadata,
    PagedMetadataBuilder,
)
from vllm_ssdkv.connector.messages import Row
from vllm_ssdkv.connector.worker.host_copy import HostCopy
from vllm_ssdkv.connector.worker.paged_step import PagedStep

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
        HostCopy(torch.zeros((1, 1), dtype=torch.int32)),
        torch.tensor(places),
        len(places),
    )


def attend(given: PagedMetadata | None) -> torch.Tensor:
    impl = PagedAttentionImpl(4, 32, 1.0, 2)
    query, new = torch.ones(TOKENS, 4, 32), torch.ones(TOKENS, 2, 32)
    layer: Any = SimpleNamespace(layer_name="layers.0")
    output = torch.full((TOKENS, 4, 32), torch.nan)
    return impl.forward(layer, query, new, new, torch.zeros(0), given, output)


def test_rows_of_a_step_wait_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows, in another order than in the plan, the first in mid-prompt."""
    spec: Any = SimpleNamespace(block_size=16)
    anything: Any = SimpleNamespace()
    builder = PagedMetadataBuilder(spec, [], anything, torch.device("cpu"))
    begin, lengths = torch.tensor([0, 20, 21]), torch.tensor([52, 70])
    table = torch.tensor([[0, 0, 3, 4, 0, 0], [0, 0, 0, 8, 9, 0]], dtype=torch.int32)

    def wait(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("waited for the device")

    monkeypatch.setattr(torch.Tensor, "cpu", wait)
    made = builder.build(
        0,
        CommonAttentionMetadata(
            query_start_loc=begin,
            query_start_loc_cpu=begin,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=2,
            num_actual_tokens=21,
            max_query_len=20,
            max_seq_len=70,
            block_table_tensor=table,
            slot_mapping=torch.zeros(21, dtype=torch.int64),
        ),
    )
    step = PagedStep.__new__(PagedStep)
    step._rows = (Row("a", 9, 8, 69, 3), Row("b", 3, 0, 32, 2, 20))
    step._by_block = {9: 0, 3: 1}
    rows = PagedAttentionImpl._rows(step, made, 16)
    assert rows.stream_row.tolist() == [1, 0]
    assert rows.window_ids.tolist() == [3, 4, 8, 9]
    assert rows.first_position.tolist() == [32, 69]
    for planned in (Row("a", 9, 8, 68, 3), Row("c", 10, 8, 69, 3)):
        step._rows = (planned, step._rows[1])
        step._by_block = {planned.write_block: 0, 3: 1}
        with pytest.raises(StepError, match=r"\[32, 69\].*\[3, 9\].*planned for \[32, "):
            PagedAttentionImpl._rows(step, made, 16)


def serve(*, began: bool) -> None:
    worker: Any = SimpleNamespace(paged=SimpleNamespace(step=None, projector=None), began=began)
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
