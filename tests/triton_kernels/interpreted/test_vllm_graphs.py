"""vLLM's own capture and dispatch of whole steps, with our backend in them, recorded: there is no
GPU. What vLLM does to fill a batch is done here; its model runner does not run on CPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from tests.connector.kinds import configuration, make
from tests.triton_kernels.interpreted.test_captured_step import Passed, forget_frames
from tests.triton_kernels.recorded import Recorded
from vllm_ssdkv.base.errors import StepError, StoreError
from vllm_ssdkv.connector import active_worker, attention_impl, graphs
from vllm_ssdkv.connector.attention_impl import PagedAttentionImpl, PagedMetadataBuilder
from vllm_ssdkv.profiling.decode_harness.decoder import PagedDecoder, Room
from vllm_ssdkv.profiling.decode_harness.models import make_model, small_config
from vllm_ssdkv.profiling.decode_harness.tokens import config_of
from vllm_ssdkv.store.read.miss_answers import MissAnswers
from vllm_ssdkv.triton_kernels.store_kv import store_kv

CPU = torch.device("cpu")
SEQS, LONGEST, BLOCK, LAYERS, HEADS, KV_HEADS, SIZE = 4, 160, 16, 2, 4, 2, 16
PROMPTS = {"a": 95, "b": 40, "c": 3}
STEPS = 2


class Batch:
    """Input buffers of vLLM's runner, and a model that is attention alone."""

    def __init__(self, decoder: PagedDecoder) -> None:
        self.decoder = decoder
        self.captures = False  # asked by the decoder, whose own graphs are not wanted
        self.slots = torch.full((SEQS,), -1, dtype=torch.int64)
        self.lengths = torch.zeros(SEQS, dtype=torch.int32)
        self.table = torch.zeros((SEQS, LONGEST // BLOCK + 2), dtype=torch.int32)
        self.query = torch.zeros((LAYERS, SEQS, HEADS, SIZE))
        self.key, self.value = torch.zeros((2, LAYERS, SEQS, KV_HEADS, SIZE))
        self.out = torch.zeros_like(self.query)
        self.found: list[torch.Tensor] = []
        self.run: Callable[[int], None] = self.eager
        self.draw = torch.Generator().manual_seed(5)
        spec: Any = SimpleNamespace(block_size=BLOCK)
        anything: Any = SimpleNamespace()
        self.builder = PagedMetadataBuilder(spec, [], anything, CPU)
        self.impl = PagedAttentionImpl(HEADS, SIZE, 0.25, KV_HEADS)
        self.caches: list[torch.Tensor] = decoder._caches

    def described(self, rows: int) -> CommonAttentionMetadata:
        begin = torch.arange(rows + 1, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=begin,
            query_start_loc_cpu=begin,
            seq_lens=self.lengths[:rows],
            seq_lens_cpu_upper_bound=self.lengths[:rows].clone(),
            num_reqs=rows,
            num_actual_tokens=rows,
            max_query_len=1,
            max_seq_len=LONGEST,
            block_table_tensor=self.table[:rows],
            slot_mapping=self.slots[:rows],
        )

    def forward(self, metadata: Any, rows: int) -> None:  # noqa: ANN401 - vLLM's own
        for number in range(LAYERS):
            layer: Any = SimpleNamespace(layer_name=f"layers.{number}")
            cache = self.caches[number]
            new = self.key[number, :rows], self.value[number, :rows]
            self.impl.do_kv_cache_update(layer, *new, cache, self.slots[:rows])
            out = self.out[number, :rows]
            self.impl.forward(layer, self.query[number, :rows], *new, cache, metadata, out)

    def eager(self, rows: int) -> None:
        self.forward(self.builder.build(0, self.described(rows)), rows)

    def __call__(self, ids: torch.Tensor, *_: object) -> torch.Tensor:
        """Do a step of the requests that the decoder has prepared."""
        rows = len(ids)
        self.slots.fill_(-1)
        self.lengths.zero_()
        self.slots[:rows] = self.decoder._mapping
        for row, (request, _) in enumerate(self.decoder._now):
            self.lengths[row] = request.tokens + 1
            self.table[row, : len(request.hbm)] = torch.tensor(request.hbm, dtype=torch.int32)
        for part in (self.query, self.key, self.value):
            part.copy_(torch.randn(part.shape, generator=self.draw))
        self.run(rows)
        self.found.append(self.out[:, :rows].clone())
        return torch.zeros(rows, 1)


@pytest.fixture
def vllm_config(tmp_path: Path) -> VllmConfig:
    config = configuration(make(tmp_path, "llama"), max_num_seqs=SEQS, max_model_len=LONGEST)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    config.compilation_config.cudagraph_capture_sizes = [2, SEQS]
    config.compilation_config.max_cudagraph_capture_size = SEQS
    return config


@contextlib.contextmanager
def batch_of(selector: Any, store: Path) -> Iterator[Batch]:  # noqa: ANN401 - a name
    """A worker of page mode with three requests: their contexts, none of the last one."""
    model: Any = make_model(
        small_config("llama", layers=LAYERS, head_size=SIZE), CPU, torch.float32
    )
    made = torch.Generator().manual_seed(2)
    room = Room(SEQS, LONGEST, BLOCK, chunk=64)
    options = config_of(selector, budget=0.6)
    options = options.model_copy(update={"mode": "page"})
    with PagedDecoder(model, options, room, store) as decoder:
        kv = torch.randn((2, LONGEST, KV_HEADS, SIZE), generator=made)
        active_worker.set_worker(decoder.worker)
        try:
            for name, tokens in PROMPTS.items():
                decoder.start(name, tokens + (name == "c"))
                decoder.fill(
                    name, tokens, lambda layer, first, count: tuple(kv[:, first : first + count])
                )
            decoder.passes = Batch(decoder)  # type: ignore[assignment]  # as far as it is asked
            yield decoder.passes  # type: ignore[misc]
        finally:
            active_worker.set_worker(None)


def steps(batch: Batch) -> list[torch.Tensor]:
    """Outputs of steps of three requests, of which one first has the last token of its prompt, and
    of one more of two."""
    for names in [list(PROMPTS)] * STEPS + [["a", "b"]]:
        batch.decoder.step(names, torch.zeros(len(names), dtype=torch.int64))
    return batch.found


def steps_from_drives(batch: Batch) -> tuple[list[torch.Tensor], list[float]]:
    """Outputs of steps of two requests of which one lacks frames, and where its pages came from."""
    forget_frames(batch.decoder)
    for _ in range(STEPS):
        batch.decoder.step(["a", "b"], torch.zeros(2, dtype=torch.int64))
    if (device := batch.decoder.worker.page_mode.device) is not None:
        device.leases.settle()  # which counts
    counters, tiers = batch.decoder.worker.counters, ("page_cache", "ssd")
    return batch.found[-STEPS:], [
        counters.total("sparse_pages_fetched", tier=tier) for tier in tiers
    ]


def manager_of(config: Any, batch: Batch, patch: pytest.MonkeyPatch) -> CudaGraphManager:  # noqa: ANN401
    """vLLM's manager of graphs, which has captured what it wants to."""
    decoder, worker = batch.decoder, batch.decoder.worker
    config.kv_transfer_config.kv_connector_extra_config = {
        "mode": "page",
        "selector": decoder.config.selector,
        "devices": ["/nowhere"],
    }
    config.compilation_config.static_forward_context = {
        name: SimpleNamespace(impl=batch.impl, sliding_window=None)
        for name in decoder.layout.layer_names
    }
    support = PagedMetadataBuilder.get_cudagraph_support(config, batch.builder.kv_cache_spec)
    assert support == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    mode = config.compilation_config.resolve_cudagraph_mode_and_sizes(
        support, "CUSTOM", 1, use_v2_model_runner=True
    )
    assert mode == CUDAGraphMode.FULL_DECODE_ONLY

    def store(paged: Any, key: Any, value: Any, cache: Any, slots: Any, _: object) -> None:  # noqa: ANN401
        store_kv(key, value, paged.flat(cache), slots, paged.block_layout)

    patch.setattr(attention_impl, "store_new", store)
    patch.setattr(torch.cuda, "Event", Passed)
    graphs.attach(config, worker, batch.caches)
    one = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    patch.setattr(cudagraph_utils, "get_pp_group", lambda: one)
    patch.setattr(cudagraph_utils, "is_global_first_rank", lambda: False)
    patch.setattr(cudagraph_utils, "graph_capture", lambda device: contextlib.nullcontext())
    patch.setattr(cudagraph_utils, "capture_pool", lambda *_: contextlib.nullcontext())
    patch.setattr(cudagraph_utils, "current_stream", lambda: None)
    platform = SimpleNamespace(get_global_graph_pool=lambda: None)
    patch.setattr(cudagraph_utils, "current_platform", platform)
    patch.setattr(torch.cuda, "CUDAGraph", Recorded)
    patch.setattr(torch.cuda, "graph", lambda graph, pool, stream: graph)
    manager = CudaGraphManager(config, CPU, mode, decode_query_len=1)

    def create(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], None]:
        assert (desc.cg_mode, desc.num_tokens) == (CUDAGraphMode.FULL, desc.num_reqs)
        batch.slots.fill_(-1)
        metadata = batch.builder.build_for_cudagraph_capture(batch.described(desc.num_tokens))
        return lambda mode: batch.forward(metadata, desc.num_tokens)

    manager.capture(create)
    return manager


@pytest.mark.parametrize("selector", ["bounds", pytest.param("exact", marks=pytest.mark.soak)])
def test_steps_that_vllm_replays_attend_as_others_do(
    selector: str, tmp_path: Path, vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with batch_of(selector, tmp_path / "eager") as batch:
        want = list(steps(batch))
        if selector == "bounds":
            from_drives, tiers = steps_from_drives(batch)
    replayed: list[int] = []
    with batch_of(selector, tmp_path / "captured") as batch:
        manager = manager_of(vllm_config, batch, monkeypatch)
        assert sorted(desc.num_tokens for desc in manager.graphs) == [2, SEQS]
        assert not batch.out.any(), "rows of a capture are padding"

        def replay(rows: int) -> None:
            desc = manager.dispatch(rows, rows, 1, 0)
            replayed.append(desc.num_tokens)
            batch.builder.build(0, batch.described(desc.num_tokens))  # vLLM does, in each step
            manager.run_fullgraph(desc)

        batch.run = replay
        got = steps(batch)
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
        counters, chosen = batch.decoder.worker.counters, "sparse_pages_selected"
        batch.decoder.forget("c")
        assert (counters.total(chosen) > 0) == (selector == "bounds")
        if selector == "bounds":
            found, counted = steps_from_drives(batch)
            for mine, theirs in zip(found, from_drives, strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
            assert counted == tiers
            assert tiers[1] > 0
            # Nobody answers any more: a row that lacks pages is recovered as any lost one.
            monkeypatch.setattr(MissAnswers, "begin", lambda *_: 0)
        forget_frames(batch.decoder)
        with pytest.raises(StoreError, match=r"requests \['a'\] lost"):
            batch.decoder.step(["a", "b"], torch.zeros(2, dtype=torch.int64))
        assert replayed == [SEQS] * STEPS + [2] * (2 + STEPS * (selector == "bounds"))


class Late(Passed):
    """A mark that the device does not come by."""

    def query(self) -> bool:
        return False


def test_a_step_ends_where_the_device_is_late_or_was_not_asked(
    tmp_path: Path, vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows are lost where nobody knows which are; what tables do not describe is an error."""
    with batch_of("exact", tmp_path / "captured") as batch:
        manager = manager_of(vllm_config, batch, monkeypatch)
        batch.run = lambda rows: manager.run_fullgraph(manager.dispatch(rows, rows, 1, 0))
        paged = batch.decoder.worker.page_mode
        device, options = paged.device, paged.config
        assert device is not None
        forget_frames(batch.decoder)
        soon = options.io.model_copy(update={"deadline": 0.01})
        paged.config = options.model_copy(update={"io": soon})
        device._new_event = Late
        with pytest.raises(StoreError, match=r"requests \['a', 'b', 'c'\] lost"):
            steps(batch)
        device._window_blocks = 0
        with pytest.raises(StepError, match=r"do not describe.*PIECEWISE"):
            steps(batch)
