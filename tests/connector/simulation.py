"""vLLM's real scheduler with our half of it, and workers that compute nothing but remember all.

The KV of a token is stood for by a number that depends on every token before it. Workers keep such
numbers for HBM blocks and slots, move them as they are told, and compare whatever a request is
about to attend to with what its tokens say. So a slot given away too early, a stale block, a
context with a hole or a key on the wrong data is found at once, in many orders of events.

I/O ends when the test says so, well or badly.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.connector.rank import BLOCK, DEVICES, SLOT_BYTES, WEIGHTS, Pace, Rank
from tests.connector.symbols import Symbols, accepted, answer, extend, of_group, state_after
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.connector import startup
from vllm_ssdkv.connector.kv_cache_spec import TieredAttentionSpec
from vllm_ssdkv.connector.messages import (
    Row,
)
from vllm_ssdkv.connector.metadata import SSDKVMetadata
from vllm_ssdkv.connector.scheduler.admission_slots import AdmissionSlots
from vllm_ssdkv.connector.scheduler.block_keys import KEY_BYTES
from vllm_ssdkv.connector.scheduler.identities import RankIdentities
from vllm_ssdkv.connector.scheduler.load_or_recompute import LoadOrRecompute
from vllm_ssdkv.connector.scheduler.scheduler import SSDKVScheduler
from vllm_ssdkv.connector.scheduler.scheduler_parts import EngineFacts, SchedulerStore
from vllm_ssdkv.connector.scheduler.speculation import Speculation
from vllm_ssdkv.connector.scheduler.suspension import Suspension
from vllm_ssdkv.offload.xcache.x_rule import XShape
from vllm_ssdkv.plugin import register
from vllm_ssdkv.store.devices.wear import WearLedger
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.segment import Extent, Segment
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.index.slot_index import SlotIndex
from vllm_ssdkv.store.own_store import OwnStore
from vllm_ssdkv.store.placement.placement import Placement
from vllm_ssdkv.store.placement.rebalancer import Rebalancer
from vllm_ssdkv.store.write_policy import WritePolicy

WINDOW = 32
CHUNK = 48
SEATS = 4
MAX_MODEL_LEN = 256
GARBAGE = -1
"""Stands for KV that was computed from a context that could not be read."""
VERSIONS = 4
"""Of weights, and of an adapter."""
MIXED = -2
"""Stands for KV that was computed by one set of weights from KV of another."""


def engine_config(model: Path, mode: str, **options: object) -> VllmConfig:
    """Configuration of an engine; simulations may share one."""
    register()
    transfer: Any = {
        "kv_connector": "SSDKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"mode": mode, "hbm_window_tokens": WINDOW, **options},
    }
    return EngineArgs(
        model=str(model),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=SEATS,
        enforce_eager=True,
        skip_tokenizer_init=True,
        kv_transfer_config=transfer,
    ).create_engine_config()


def drafts_like(method: str, count: int = 3) -> SpeculativeConfig:
    """Options of speculative decoding, with the scheduler's half of a method."""
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=count, prompt_lookup_max=3)
    drafts.method = method
    return drafts


STATE = -1
"""In place of a window: layers with a state."""
STATE_IN_CHUNK = -2
"""As ``STATE``; the end of the prompt's last whole block is kept without a step that ends there."""


def specs(
    windows: Sequence[int | None], in_hbm: int | None, sizes: Sequence[int] = ()
) -> list[KVCacheSpec]:
    """Make the layers' specs of the groups, whose blocks have ``sizes`` in tokens; in page mode HBM
    holds ``in_hbm`` tokens."""
    found: list[KVCacheSpec] = []
    for window, size in zip(windows, sizes or [BLOCK] * len(windows), strict=True):
        shape: Any = {
            "block_size": size,
            "num_kv_heads": 1,
            "head_size": 8 * BLOCK // size,
            "dtype": torch.float32,
        }
        full = FullAttentionSpec(**shape)
        if in_hbm is not None:
            return [TieredAttentionSpec.like(full, in_hbm)]
        if window is None:
            found.append(full)
        elif window >= 0:
            found.append(SlidingWindowSpec(**shape, sliding_window=window))
        else:
            inside = window == STATE_IN_CHUNK
            found.append(
                MambaSpec(
                    block_size=size,
                    shapes=((8,),),
                    dtypes=(torch.float32,),
                    page_size_padded=full.page_size_bytes,
                    mamba_cache_mode="align",
                    num_prefill_checkpoint_blocks=int(inside),
                    prefill_checkpoint_alignment=1 if inside else None,
                )
            )
    return found


class SavedAtOnce:
    """A manifest that takes no time, unless it is ``late``."""

    late = False

    def put(self, segments: Sequence[Segment]) -> None:
        self.segments = segments

    def saved(self) -> bool:
        return not self.late

    def error(self) -> str:
        return "store.json: of a test" if self.late else ""

    def wait(self, timeout_s: float) -> bool:
        return True

    def close(self, timeout_s: float) -> bool:
        return True


def segments_of(slots: int) -> list[Segment]:
    """Ten slots each, of one unit, on two devices in turn."""
    made: list[Segment] = []
    for first in range(0, slots, 10):
        count = min(10, slots - first)
        begin = first // 2
        extents = (Extent(0, begin, (count + 1) // 2), Extent(1, begin, count // 2))
        made.append(Segment(first, count, count, (0, 1), extents))
    return made


class Simulation:
    """An engine. ``depth`` 2 schedules a step before the last one's output is known, as vLLM does
    on GPUs; 1 does not, as on CPUs.
    """

    def __init__(
        self,
        config: VllmConfig,
        *,
        slots: int = 40,
        hbm_blocks: int = 24,
        ranks: int = 1,
        depth: int = 1,
        index: SlotIndex | None = None,
        pace: Pace | None = None,
        frames: int = 0,
        drafts: SpeculativeConfig | None = None,
        windows: Sequence[int | None] = (None,),
        retention: int | None = None,
        verify_hits: int = 0,
        x_share: float = 0.0,
        x_blocks: int = 2,
        on_reset: str = "keep",
        sizes: Sequence[int] | None = None,
    ):
        """``windows``: of each KV cache group in reuse mode; None is full attention. ``retention``:
        ``--prefix-cache-retention-interval``; None keeps everything. ``sizes``: tokens of a block
        of each group, of which the largest is one of ours. ``x_blocks``: blocks whose X shares a
        slot."""
        self.sizes = tuple(sizes or [BLOCK] * len(windows))
        hash_tokens = min(self.sizes)
        config.speculative_config = drafts
        states = any(window is not None and window < 0 for window in windows)
        config.cache_config.mamba_cache_mode = "align" if states else "none"
        self.windows = windows
        extra = config.kv_transfer_config.kv_connector_extra_config
        self.paged = extra["mode"] == "page"
        geometry = SlotGeometry("opaque", 2, 1, 1, 4096)
        assert geometry.slot_bytes == SLOT_BYTES
        self.index = index or SlotIndex(slots, None)
        segments = segments_of(self.index.num_slots)
        self.placement = Placement(geometry, segments, DEVICES)
        self.manifest = SavedAtOnce()
        self.pace = pace or Pace()

        def pace_clock() -> float:
            return self.pace.now

        self.rebalancer = Rebalancer(
            self.index,
            self.placement,
            [1.0] * DEVICES,
            self.manifest,
            Counters(),
            clock=pace_clock,
        )

        paths = [f"device{i}" for i in range(DEVICES)]
        counters = Counters()
        self.suspensions: list[str] = []
        """Reasons that were saved."""
        options = startup.SSDKVConfig.from_extra_config(
            {**extra, "verify_hits": verify_hits, "on_reset": on_reset}
        )
        self.write_policy = WritePolicy(
            options,
            options.devices,
            WearLedger(None, paths, counters, clock=pace_clock),
            [float(SLOT_BYTES / DEVICES * ranks)] * DEVICES,
            self.index.num_slots,
            counters,
        )
        self.choice = LoadOrRecompute(
            always=self.paged,
            block_tokens=BLOCK,
            chunk_tokens=CHUNK,
            ranks=ranks,
            counters=counters,
            clock=pace_clock,
        )
        self.seats = AdmissionSlots(config.scheduler_config)
        suspension = Suspension(self.index, counters, self.suspensions.append, [Path("store")])
        self.ours = SSDKVScheduler(
            options,
            EngineFacts(
                BLOCK,
                MAX_MODEL_LEN,
                ranks,
                Speculation.of(config, BLOCK),
                x_share=x_share,
                x_shape=XShape(hidden=2 * 96 // x_blocks, kv_heads=1, head_size=96, itemsize=2),
                hashes_per_block=BLOCK // hash_tokens,
                kv_events=startup.publishes_events(config, own=True),
                steps_ahead=depth,
            ),
            SchedulerStore(
                self.index,
                self.rebalancer,
                suspension,
                self.write_policy,
                counters,
                own=OwnStore.of(self.index, self.rebalancer, paths, counters, whole=self.paged),
            ),
            RankIdentities(Fingerprint({}), [WEIGHTS] * ranks),
            self.choice,
            self.seats,
        )
        config.cache_config.num_gpu_blocks = hbm_blocks
        config.scheduler_config.async_scheduling = depth > 1
        config.kv_transfer_config.kv_load_failure_policy = "recompute"
        groups = [
            KVCacheGroupSpec([f"layer{g}"], spec)
            for g, spec in enumerate(
                specs(windows, extra["hbm_window_tokens"] if self.paged else None, self.sizes)
            )
        ]
        with mock.patch.object(startup, "open_scheduler", return_value=self.ours):
            self.scheduler = (AsyncScheduler if depth > 1 else Scheduler)(
                vllm_config=config,
                kv_cache_config=KVCacheConfig(
                    hbm_blocks, [], groups, prefix_cache_retention_interval=retention
                ),
                structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK,
                hash_block_size=hash_tokens,
            )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hash_tokens, sha256)
        self.ranks = [
            Rank(number, Placement(geometry, segments, DEVICES), self.pace, sizes=self.sizes)
            for number in range(ranks)
        ]
        for rank in self.ranks:
            rank.report.frames = frames
        self._seeds = self._name_seeds()
        self.hbm: dict[int, Symbols] = {}
        self.content: dict[bytes, Symbols] = {}
        """What belongs under each key."""
        self.tokens: dict[str, list[int]] = {}
        """What each request's tokens are, as the workers see them."""
        self.delivered: dict[str, list[int]] = {}
        self.finished: set[str] = set()
        self.requests: dict[str, Request] = {}
        self.preempted = 0
        self.accepted = 0
        """Drafts that were right."""
        self.right = 0.6
        """How often one is."""
        self.version = 0
        """Of the weights in memory."""
        self.reloads = 0
        self.files: dict[int, int] = {}
        """Adapters, by number, as their files are: a version each."""
        self.loaded: dict[int, int] = {}
        """Adapters that vLLM holds in memory."""
        self.mixed: set[str] = set()
        """Requests that computed from KV of other weights, as vLLM lets them."""
        self.began: dict[str, int] = {}
        """Tokens that were computed when a request first ran."""
        self.plans: list[SSDKVMetadata] = []
        self._known: dict[tuple[str, bytes], list[bytes]] = {}
        self._decoding: set[str] = set()
        self._guesses = random.Random(0)
        # With drafts vLLM asks for results before it ends a step, which page mode then does itself.
        self._ends_late = drafts is not None and not self.paged
        self._depth = depth
        self._queue: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._aggregator = KVOutputAggregator(ranks)

    # ---- what a test does ----

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: Mapping[str, Any] = MappingProxyType({}),
        **others: Any,  # noqa: ANN401 - options of Request
    ) -> Request:
        request = Request(
            name,
            list(prompt),
            SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling),
            None,
            block_hasher=self._hasher,
            **others,
        )
        self.requests[name] = request
        self.delivered[name] = []
        self._learn(name)
        self.scheduler.add_request(request)
        return request

    def keys_of(self, prompt: Sequence[int]) -> list[bytes]:
        """Keys of a prompt's full blocks, as any request finds them."""
        request = Request(
            "asks", list(prompt), SamplingParams(max_tokens=1), None, block_hasher=self._hasher
        )
        return self.ours.keys_of(request)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def empty_hbm(self) -> None:
        """HBM gives its blocks up, as for others: that is no reset."""
        pool = self.scheduler.kv_cache_manager.block_pool
        self.scheduler.kv_cache_manager.evict_blocks(set(range(pool.num_gpu_blocks)))

    def preempt_all(self) -> None:
        """As an operator's reset of the prefix cache does; vLLM cannot while a load fills HBM."""
        running = {request.request_id for request in self.scheduler.running}
        groups = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        holders = {name for group in groups for name in group.req_to_blocks}
        if holders <= running and not self._queue:
            self.preempted += len(self.scheduler.running)
            assert self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def reload(self, version: int) -> None:
        """Other weights are loaded into the running engine."""
        self.reloads += 1
        self.version = version
        for rank in self.ranks:
            rank.weights = WEIGHTS + b"%d" % version if version else WEIGHTS

    def load_adapter(self, number: int) -> None:
        """vLLM reads an adapter's files, unless it holds it."""
        self.loaded.setdefault(number, self.files[number])

    def unload_adapter(self, number: int) -> None:
        """vLLM gives an adapter up, as it does for others."""
        self.loaded.pop(number, None)

    def seed(self, request: Request) -> int:
        """Stands for what a request computes with."""
        if request.lora_request is None:
            return self.version
        return 1000 * self.loaded.get(request.lora_request.lora_int_id, 0) + self.version

    def _name_seeds(self) -> dict[bytes, int]:
        """Stand-ins of the model, by the identity that keys are bound to."""
        found = {}
        for version in range(VERSIONS):
            weights = WEIGHTS + b"%d" % version if version else WEIGHTS
            ranks = RankIdentities(Fingerprint({}), [weights] * len(self.ranks))
            found[ranks.namespace] = version
            for adapter in range(VERSIONS):
                digests = b"%d" % adapter * len(self.ranks)
                bound = hashlib.blake2b(ranks.namespace + digests, digest_size=KEY_BYTES).digest()
                found[bound] = 1000 * adapter + version
        return found

    def lose_device(self, device: int) -> None:
        """A device dies on every rank."""
        slots = torch.arange(self.index.num_slots).numpy()
        for rank in self.ranks:
            rank.broken.update(slots[rank.placement.touches(device, slots)].tolist())
            rank.report.lost_devices.append(device)

    def return_device(self, device: int) -> None:
        """It is there again, with wrong bytes."""
        for rank in self.ranks:
            rank.report.returned_devices.append(device)

    def step(self) -> SSDKVMetadata | None:
        """One turn of the engine core's loop; the plan, if a step was scheduled."""
        plan = None
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            plan = output.kv_connector_metadata
            assert isinstance(plan, SSDKVMetadata)
            self.plans.append(plan)
            self._queue.append((output, self._execute(output, plan)))
            if len(self._queue) < self._depth and output.total_num_scheduled_tokens:
                return plan
        if self._queue:
            self._deliver(*self._queue.popleft())
        return plan

    def end_io(self, good: bool = True) -> None:
        """Every write and load ends."""
        for rank in self.ranks:
            while rank.writes:
                rank.end_write(good)
            while rank.loads:
                rank.end_load(good, self.hbm, self.content)

    def run(self, steps: int = 2000) -> None:
        """Until nothing is left to do."""
        for _ in range(steps):
            if not (self.scheduler.has_requests() or self._queue):
                return
            self.step()
            self.end_io()
        raise TimeoutError(f"not idle after {steps} steps: {self.scheduler.requests}")

    # ---- what must hold ----

    def check_answers(self, names: Iterable[str]) -> None:
        """These requests have ended with the right tokens."""
        for name in names:
            request = self.requests[name]
            right = answer(request.prompt_token_ids or [], request.max_tokens, self.seed(request))
            assert name in self.finished, f"{name} has not finished"
            assert self.delivered[name] == right, name

    def check_idle(self) -> None:
        """Nothing is held, here or in vLLM."""
        gauges = self.index.gauges()
        assert (gauges["pinned"], gauges["reserved"], gauges["writing"]) == (0, 0, 0), gauges
        away = gauges["lost"] + gauges["masked"]
        assert gauges["free"] + gauges["evictable"] + away == self.index.num_slots
        assert self.ours.remembers() == {}
        assert not self.ours.unfinished()
        assert all(not rank.contexts for rank in self.ranks)
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1

    # ---- the workers ----

    def _execute(self, output: SchedulerOutput, plan: SSDKVMetadata) -> ModelRunnerOutput:
        for name in output.num_scheduled_tokens:
            self._learn(name)
            adapter = self.requests[name].lora_request
            if adapter is not None:
                if adapter.load_inplace:
                    self.unload_adapter(adapter.lora_int_id)
                self.load_adapter(adapter.lora_int_id)
        for rank in self.ranks:
            rank.adapters = {number: b"%d" % of for number, of in self.loaded.items()}
            rank.lost = set(self.rebalancer.out_of_use().nonzero()[0].tolist())
            rank.begin(plan)
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        fresh = {new.req_id for new in output.scheduled_new_reqs} | cached.resumed_req_ids
        for name in fresh:
            self.tokens[name] = list(self.scheduler.requests[name].all_token_ids)
            self._decoding.discard(name)
            self.mixed.discard(name)
        for name in output.num_scheduled_tokens:
            goes_back = starts[name] < len(self.tokens[name]) - 1
            if name in self._decoding and goes_back and not self.scheduler.num_spec_tokens:
                # What it had sampled was dropped: a block before was invalid.
                self.tokens[name] = list(self.scheduler.requests[name].all_token_ids)
                self._decoding.discard(name)
        rows = {row.request_id: row for row in plan.rows}
        spoiled: list[set[int]] = [set() for _ in self.ranks]
        sampled: list[list[int]] = []
        for name, count in output.num_scheduled_tokens.items():
            tokens, drafts = self.tokens[name], self._drafted(name, output)
            start = starts[name]
            self.began.setdefault(name, start)
            if name in self._decoding:
                # Before outputs are known vLLM believes that every draft was accepted.
                assert len(tokens) - 1 == start or self._depth > 1
                start = len(tokens) - 1
            row = rows.get(name) or Row(name, 0, 0, start, 0)
            seed = self.seed(self.requests[name])
            symbols = extend(seed, [*tokens, *drafts][: start + count])
            good = self._compute(name, start, symbols, row)
            for rank, slots in zip(self.ranks, spoiled, strict=True):
                if self.paged and not good:
                    slots.update(rank.poison(row) if rank.number in self._blind else ())
            sampled.append([])
            if start + count >= len(tokens):
                self._decoding.add(name)
                last = symbols[len(tokens) - 1 :] if good else [GARBAGE]
                last = [MIXED] if name in self.mixed else last
                sampled[-1] += accepted(last, drafts)
                tokens += sampled[-1]
                self.accepted += len(sampled[-1]) - 1
        seconds = output.total_num_scheduled_tokens * self.pace.token_s
        self.pace.now += seconds
        outputs = [rank.output() for rank in self.ranks] if self._ends_late else []
        for rank, slots in zip(self.ranks, spoiled, strict=True):
            rank.end(plan, self.hbm, slots)
            if plan.timed and seconds:
                rank.report.steps.append((plan.step, seconds))
        names = list(output.num_scheduled_tokens)
        results = [
            ModelRunnerOutput(
                names,
                {name: i for i, name in enumerate(names)},
                sampled,
                kv_connector_output=told,
            )
            for told in outputs or [rank.output() for rank in self.ranks]
        ]
        joined = self._aggregator.aggregate(list(results))
        assert joined is not None
        return joined

    def _drafted(self, name: str, output: SchedulerOutput) -> list[int]:
        """The drafts that a request's step looks at."""
        drafts = output.scheduled_spec_decode_tokens.get(name, [])
        if -1 in drafts:  # Those of the step before, which vLLM's scheduler has not seen.
            return self._guess(name)[: len(drafts)]
        return drafts

    def _guess(self, name: str) -> list[int]:
        """What may follow the request's tokens."""
        count = self.scheduler.num_spec_tokens
        right = answer(self.tokens[name], count)
        return [token if self._guesses.random() < self.right else 1 for token in right]

    def _compute(self, name: str, start: int, right: Symbols, row: Row) -> bool:
        """Attend and write KV, ``right`` from ``start`` on; whether every rank could read the
        context."""
        groups = self.scheduler.kv_cache_manager.get_block_ids(name)
        if self.paged:
            assert row.first_position == start
            assert row.write_block == groups[0][start // BLOCK]
        contexts = [rank.context(row) if self.paged else [] for rank in self.ranks]
        self._blind = {i for i, context in enumerate(contexts) if context is None}
        good = not self._blind
        if good:
            # One rank alone may read what another knows to be bad: its output is not used.
            for context in contexts:
                wanted = right[: row.hbm_start * BLOCK if self.paged else 0]
                self._attend(name, context or [], wanted)
        for group, blocks in enumerate(groups):
            symbols, first = of_group(right, group), row.hbm_start
            window, size = self.windows[group], self.sizes[group]
            if window is not None and window < 0:
                self._compute_state(name, group, start, right)
                continue
            if window is not None and not self.paged:
                first = max(0, start - window + 1) // size
            if good:
                held = [s for block in blocks[first : -(-start // size)] for s in self.hbm[block]]
                wanted = symbols[first * size : start]
                self._attend(name, held[: len(wanted)], wanted)
            for position in range(start, len(right)):
                block = blocks[position // size]
                assert block, "KV is written to the null block"
                at = position % size
                symbol = symbols[position] if good else GARBAGE
                symbol = MIXED if name in self.mixed else symbol
                self.hbm[block] = [*self.hbm.get(block, [])[:at], symbol]
        return good

    def _attend(self, name: str, held: Symbols, wanted: Symbols) -> None:
        """A request attends to what it should; to KV of other weights only if some were loaded."""
        if held != wanted:
            assert self.reloads or self.files, f"{name}: attends to KV of other tokens"
            self.mixed.add(name)

    def _compute_state(self, name: str, group: int, start: int, right: Symbols) -> None:
        """As vLLM does it (``preprocess_mamba``): a step goes on from the state in the block of the
        token before it, and leaves its own in the block of its last one."""
        blocks = self.scheduler.kv_cache_manager.get_block_ids(name)[group]
        size = self.sizes[group]
        if start:
            held, wanted = blocks[(start - 1) // size], state_after(right[start - 1], group, size)
            assert held, f"{name}: the state is gone"
            assert self.hbm[held] == wanted, f"{name}: HBM holds the state of other tokens"
        manager = self.scheduler.kv_cache_manager.coordinator.single_type_managers[group]
        position, at = manager._checkpoints.get(name, (0, 0))
        if start < position < len(right):
            assert blocks[at], "a state is written to the null block"
            self.hbm[blocks[at]] = state_after(right[position - 1], group, size)
        last = blocks[(len(right) - 1) // size]
        assert last, "a state is written to the null block"
        self.hbm[last] = state_after(right[-1], group, size)

    def _learn(self, name: str) -> None:
        """Note what belongs under the keys that vLLM knows by now."""
        request = self.requests[name]
        identity = self.ours.keys.identity(request)
        seed, before = self._seeds.get(identity), self._known.get((name, identity), [])
        keys = self.ours.keys_of(request)
        # From where its tokens are decoded by choosing a request has other keys.
        known = len(before) - sum(a != b for a, b in zip(before, keys, strict=False))
        if request.is_finished():
            self.ours.keys.forget(name)  # which it has been, before it was asked for here
        if len(keys) > known:
            assert seed is not None
            symbols = extend(seed, request.all_token_ids[: len(keys) * BLOCK])
            for part, (group, end) in enumerate(self._parts()):
                named, size = self.ours.groups.keys(keys, part), self.sizes[group]
                state = (self.windows[group] or 0) < 0
                for block in range(known, len(keys)):
                    last = block * BLOCK + end
                    right = of_group(symbols[last - size : last], group)
                    if state:
                        right = state_after(symbols[last - 1], group, size)
                    assert self.content.setdefault(named[block], right) == right
            self._known[name, identity] = keys

    def _parts(self) -> list[tuple[int, int]]:
        """The group of each part, and where its tokens end in a block of ours; the one of a group
        with states is the last."""
        return [
            (group, end)
            for group, (window, size) in enumerate(zip(self.windows, self.sizes, strict=True))
            for end in ([BLOCK] if (window or 0) < 0 else range(size, BLOCK + 1, size))
        ]

    def _deliver(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        found = self.scheduler.update_from_output(output, result)
        for core in found.values():
            for one in core.outputs:
                self.delivered[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self.finished.add(one.request_id)
        for name in output.num_scheduled_tokens:
            self._learn(name)
        if self.scheduler.num_spec_tokens and self._depth == 1:
            names = list(output.num_scheduled_tokens)
            guesses = [self._guess(name) for name in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, guesses))
