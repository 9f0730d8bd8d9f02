"""The worker's half as vLLM calls it: in every order that its model runners have."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker import kv_connector_model_runner_mixin

from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.connector import active_worker, startup
from vllm_ssdkv.connector.connector import SSDKVConnector
from vllm_ssdkv.connector.metadata import SSDKVMetadata

Step = Callable[[SSDKVConnector, SSDKVMetadata], None]


class Worker:
    """Stands for the worker; writes down what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self._step = -1

    def begin(self, plan: SSDKVMetadata) -> None:
        self._step = plan.step
        self.calls.append(("begin", plan.step))

    def end(self, plan: SSDKVMetadata) -> None:
        self.calls.append(("end", plan.step))

    def give_up(self) -> None:
        self.calls.append(("give up", self._step))

    def collect(self, *, idle: bool) -> None:
        self.calls.append(("collect", self._step))

    def take_loads(self) -> tuple[set[str], set[str]]:
        return {f"loaded-{self._step}"}, set()

    def take_invalid_blocks(self) -> set[int]:
        return set()

    def take_report(self) -> None:
        return None


def results(connector: SSDKVConnector, plan: SSDKVMetadata) -> None:
    found = connector.get_transfer_results(set())
    assert found.finished_recving == {f"loaded-{plan.step}"}
    connector.get_block_ids_with_load_errors()
    connector.build_connector_worker_meta()


def save_then_results(connector: SSDKVConnector, plan: SSDKVMetadata) -> None:
    """Both runners where there are no drafts."""
    connector.bind_connector_metadata(plan)
    connector.wait_for_save()
    results(connector, plan)
    connector.clear_connector_metadata()


def results_then_save(connector: SSDKVConnector, plan: SSDKVMetadata) -> None:
    """With a drafter: runner V1, and runner V2 of vLLM 0.33, which calls it ``finalize_step``."""
    connector.bind_connector_metadata(plan)
    results(connector, plan)
    connector.wait_for_save()
    connector.clear_connector_metadata()


@pytest.fixture
def connect(
    configs: dict[str, VllmConfig], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], tuple[SSDKVConnector, Worker]]:
    def made(mode: str) -> tuple[SSDKVConnector, Worker]:
        worker = Worker()
        monkeypatch.setattr(startup, "open_worker", lambda *_: worker)
        monkeypatch.setattr(active_worker, "set_worker", lambda _: None)
        caches = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
        return SSDKVConnector(configs[mode], KVConnectorRole.WORKER, caches), worker

    return made


@pytest.mark.parametrize("step", [save_then_results, results_then_save])
@pytest.mark.parametrize("mode", ["page", "reuse"])
def test_every_step_ends_once_in_either_order(
    connect: Callable[[str], tuple[SSDKVConnector, Worker]], mode: str, step: Step
) -> None:
    connector, worker = connect(mode)
    for number in range(3):
        step(connector, SSDKVMetadata(step=number))
    # Page mode must know which contexts could not be read before vLLM takes what was sampled.
    late = mode == "reuse" and step is results_then_save
    order = ("begin", "collect", "end") if late else ("begin", "end", "collect")
    assert worker.calls == [(call, number) for number in range(3) for call in order]


@pytest.mark.parametrize("mode", ["page", "reuse"])
def test_what_a_step_that_fails_has_not_computed_is_not_stored(
    connect: Callable[[str], tuple[SSDKVConnector, Worker]],
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM ends such a step, too. That an error is being handled around steps says nothing."""
    connector, worker = connect(mode)
    monkeypatch.setattr(kv_connector_model_runner_mixin, "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(kv_connector_model_runner_mixin, "get_forward_context", lambda: None)
    run = kv_connector_model_runner_mixin.KVConnectorModelRunnerMixin._get_kv_connector_output

    def step(number: int, *, fails: bool) -> None:
        plan = SSDKVMetadata(step=number)
        output: Any = SimpleNamespace(
            kv_connector_metadata=plan, has_sync_kv_loads=False, finished_req_ids=set()
        )
        with run(output):
            if fails:
                raise ArithmeticError(number)

    with pytest.raises(ArithmeticError):
        step(0, fails=True)
    try:
        int("")
    except ValueError:
        step(1, fails=False)
    calls = [("begin", 0), ("give up", 0), ("collect", 0)]
    assert worker.calls == [*calls, ("begin", 1), ("end", 1), ("collect", 1)]


def test_a_layer_that_projects_stored_x_is_not_at_its_end(
    connect: Callable[[str], tuple[SSDKVConnector, Worker]],
) -> None:
    """vLLM tells of it for each call: of those within its attention, too."""
    connector, _ = connect("page")
    told: list[str] = []
    worker: Any = connector.worker
    worker.layers = SimpleNamespace(computed=told.append)
    worker.paged = SimpleNamespace(projector=SimpleNamespace(projecting=True))
    nothing: Any = None
    connector.save_kv_layer("layers.0", nothing, nothing)
    assert not told
    worker.paged.projector.projecting = False
    connector.save_kv_layer("layers.0", nothing, nothing)
    assert told == ["layers.0"]


class TestFailurePolicyOfAParent:
    """MultiConnector gives its children copies of its configuration: nothing can be set there."""

    @staticmethod
    def parent(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
        transfer = SimpleNamespace(kv_connector="MultiConnector", kv_load_failure_policy=policy)
        agent = cast("Any", SimpleNamespace(_kv_transfer_config=transfer))
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", agent)

    def test_one_that_ends_requests_is_refused_with_the_setting(
        self, configs: dict[str, VllmConfig], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.parent(monkeypatch, "fail")
        named = 'MultiConnector ends requests .*"kv_load_failure_policy": "recompute"'
        with pytest.raises(UnsupportedError, match=named):
            startup.check_failure_policy(configs["reuse"])

    def test_one_that_computes_again_is_right(
        self, configs: dict[str, VllmConfig], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.parent(monkeypatch, "recompute")
        startup.check_failure_policy(configs["reuse"])
