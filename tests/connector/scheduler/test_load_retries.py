"""Order of requests after loads have failed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.connector.events import Make
from tests.connector.simulation import drafts_like
from vllm_ssdkv.connector.scheduler.load_retries import LoadRetries

HBM = cast(
    Any,
    SimpleNamespace(
        coordinator=SimpleNamespace(
            single_type_managers=[
                SimpleNamespace(
                    max_admission_blocks_per_request=None,
                    kv_cache_spec=SimpleNamespace(block_size=16),
                )
            ]
        ),
        block_pool=SimpleNamespace(get_num_free_blocks=lambda: 100),
    ),
)
OTHER = cast(Any, SimpleNamespace(request_id="b", num_tokens=16))


@pytest.mark.parametrize("failures", [1, 2])
def test_nobody_waits_for_a_request_that_runs(failures: int) -> None:
    loads = LoadRetries(16)
    for _ in range(failures):
        loads.add("a")
        assert loads.failed("a")
        assert loads.must_wait(OTHER, HBM, others=True)
        if not loads.given_up("a"):
            loads.record_lookup("a")
    assert loads.must_wait(OTHER, HBM, others=True)
    loads.scheduled("a")
    assert not loads.must_wait(OTHER, HBM, others=True)
    assert not loads


@pytest.mark.parametrize("windows", [(None,), (None, 40, 24)])
@pytest.mark.parametrize("method", ["ngram", "eagle"])
def test_room_for_drafts_is_what_vllm_wants(
    reuse: Make, windows: tuple[int | None, ...], method: str
) -> None:
    run = reuse(windows=windows, drafts=drafts_like(method))
    ours = len(windows) * run.ours.loads.retries.step_blocks
    assert ours == run.scheduler._spec_decode_step_blocks > 0


@pytest.mark.parametrize(("step_blocks", "waits"), [(0, False), (1, True)])
def test_room_for_drafts_is_needed_beside_a_load(step_blocks: int, waits: bool) -> None:
    """As vLLM wants it: else it would not admit the request, and look at nobody behind it."""
    loads = LoadRetries(16, step_blocks)
    loads.add("a")
    whole = cast(Any, SimpleNamespace(request_id="a", num_tokens=100 * 16))
    assert loads.must_wait(whole, HBM, others=True) == waits
    assert not loads.must_wait(whole, HBM, others=False)
