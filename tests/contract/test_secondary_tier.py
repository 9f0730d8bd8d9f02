"""The hooks of vLLM's own offloading that the secondary tier rests on, pinned one by one."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as offloading
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.platforms import current_platform
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.request import Request

from vllm_ssdkv.secondary_tier.tier import SSDKVTier

ENTRY = {"type": "SSDKVTier", "module_path": "vllm_ssdkv.secondary_tier"}

SIGNATURES = {
    "lookup": ["self", "key", "req_context"],
    "submit_store": ["self", "job_metadata"],
    "submit_load": ["self", "job_metadata"],
    "get_finished_jobs": ["self"],
    "has_pending_work": ["self"],
    "take_events": ["self"],
    "touch": ["self", "keys", "req_context"],
    "on_new_request": ["self", "req_context"],
    "on_request_finished": ["self", "req_context"],
    "on_schedule_end": ["self", "context"],
    "drain_jobs": ["self"],
    "shutdown": ["self"],
    "build_metric_definitions": ["extra_config"],
    "get_stats": ["self"],
}


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]  # any callable


@pytest.mark.parametrize("name", SIGNATURES)
def test_every_hook_of_a_tier_exists_with_our_arguments(name: str) -> None:
    assert parameters(getattr(SecondaryTierManager, name)) == SIGNATURES[name]
    assert parameters(getattr(SSDKVTier, name)) == SIGNATURES[name]
    assert name in vars(SSDKVTier)


def test_nothing_else_is_asked_of_a_tier() -> None:
    asked = {name for name, what in vars(SecondaryTierManager).items() if inspect.isfunction(what)}
    left_alone = {
        "serve_external_requests",
        "config_info",  # since 0.33: labels of one metric, none by default
    }
    assert {name for name in asked if not name.startswith("__")} <= SIGNATURES.keys() | left_alone


def test_a_tier_is_found_by_its_module_and_made_with_its_options() -> None:
    assert SecondaryTierFactory.get_tier_class(ENTRY) is SSDKVTier
    source = inspect.getsource(SecondaryTierFactory.create_secondary_tier)
    for name in ("offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector"):
        assert f"{name}=" in source
    assert parameters(SSDKVTier.__init__)[1:5] == parameters(SecondaryTierManager.__init__)[1:5]


def test_jobs_and_results_have_the_fields_that_are_used() -> None:
    assert {field.name for field in fields(TransferJob)} >= {
        *("job_id", "keys", "chunk_ids", "req_context")
    }
    assert [field.name for field in fields(JobResult)] == [
        *("job_id", "success", "successful_keys", "transfer_time", "transfer_bytes")
    ]


def test_a_request_remembers_what_a_tier_notes() -> None:
    context = base.ReqContext("r")
    context.set_state(7)
    assert context.get_state(int) == 7
    assert context.get_state(str) is None
    key = base.make_offload_key(bytes(32), 3)
    context.set_offload_key_position(key, 48)
    assert context.get_offload_key_position(key) == 48
    assert base.get_offload_group_idx(key) == 3
    assert len(key) == 36


def test_a_new_request_is_a_local_variable_of_who_tells_of_it() -> None:
    source = inspect.getsource(offloading.OffloadingConnectorScheduler.on_new_request)
    assert "def on_new_request(self, request: Request)" in source
    assert "self.manager.on_new_request(req_context)" in source
    assert "tier.on_new_request(req_context)" in inspect.getsource(
        TieringOffloadingManager.on_new_request
    )
    assert "req_id=req.request_id" in inspect.getsource(offloading._create_req_context)
    assert offloading.Request is Request


def test_the_configuration_is_a_local_variable_of_who_makes_the_manager() -> None:
    made = offloading.OffloadingConnectorScheduler.__init__
    assert parameters(made) == ["self", "spec", "vllm_config", "kv_cache_config"]
    assert "spec.get_manager()" in inspect.getsource(made)
    assert offloading.VllmConfig is VllmConfig


def test_a_reset_drains_the_tiers_and_does_nothing_else_to_them() -> None:
    source = inspect.getsource(TieringOffloadingManager.reset_cache)
    asked = {line.strip() for line in source.splitlines() if line.strip().startswith("tier.")}
    assert asked == {
        "tier.drain_jobs()",
        "tier.on_request_finished(state.req_context)",
        "tier.bp_detector.reset()",
    }
    whole = inspect.getsource(TieringOffloadingManager)
    assert whole.count("drain_jobs()\n") == source.count("drain_jobs()\n")


def test_groups_without_a_window_are_looked_up_first() -> None:
    source = inspect.getsource(offloading.OffloadingConnectorScheduler.__init__)
    assert "_lookup_groups = self._full_attention_groups + self._sliding_window_groups" in source


def test_a_tier_may_answer_a_look_up_later() -> None:
    """``RETRY`` has vLLM ask again in a later step, behind a call of ``on_schedule_end``."""
    source = inspect.getsource(TieringOffloadingManager.lookup)
    assert "result is LookupResult.RETRY" in source
    assert "tier.on_schedule_end(context)" in inspect.getsource(
        TieringOffloadingManager.on_schedule_end
    )
    assert "tier.on_request_finished(state.req_context)" in inspect.getsource(
        TieringOffloadingManager._maybe_finalize_request
    )
    lookup = inspect.getsource(offloading.OffloadingConnectorScheduler._maximal_prefix_lookup)
    assert "case LookupResult.RETRY:" in lookup


def test_identity_is_made_of_the_fields_of_vllms_own_file_names() -> None:
    assert parameters(FileMapper.from_offloading_spec) == [
        *("root_dir", "offloading_spec", "blocks_per_file", "parallel_agnostic")
    ]
    mapper = FileMapper("/", "m", 16, 1, 1, 1, 1, 1, 0, "float16")
    assert mapper.get_run_config().keys() >= {"model_name", "dtype", "tp_size", "kv_cache_groups"}


def test_stats_of_a_tier_are_taken_as_we_give_them() -> None:
    assert parameters(OffloadingConnectorStats.increase_counter) == [
        *("self", "counter_name", "counter_increase_value", "labelvalues")
    ]
    assert parameters(OffloadingConnectorStats.set_gauge)[1:] == [
        *("gauge_name", "gauge_value", "labelvalues")
    ]
    assert parameters(OffloadingConnectorStats.observe_histogram)[1:] == [
        *("histogram_name", "histogram_value", "labelvalues")
    ]


def test_events_have_the_fields_that_are_used() -> None:
    names = [field.name for field in fields(base.OffloadingEvent)]
    assert names[:4] == ["keys", "medium", "removed", "locality"]


def test_vllm_offloads_nothing_on_a_cpu() -> None:
    """So no test has an engine with the tier: vLLM's worker refuses."""
    assert current_platform.is_cpu()
    spec = object.__new__(CPUOffloadingSpec)
    spec._worker = None
    with pytest.raises(Exception, match="only supported on CUDA-alike and XPU GPUs"):
        spec.get_worker(None)


def test_a_chunk_in_use_is_not_given_away() -> None:
    """A job reads and writes rows of the pool until it ends: vLLM counts references on them."""
    assert parameters(CPUOffloadingManager.prepare_load) == ["self", "keys", "req_context"]
    source = inspect.getsource(TieringOffloadingManager.create_store_job)
    assert "prepare_read(keys, req_context)" in source
