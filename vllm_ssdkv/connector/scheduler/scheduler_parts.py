"""The scheduler's surroundings, and the parts that its core and its policy share."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.scheduler.hit_verifier import HitVerifier
from vllm_ssdkv.connector.scheduler.kv_groups import BlockGroups
from vllm_ssdkv.connector.scheduler.load_queue import LoadQueue
from vllm_ssdkv.connector.scheduler.request_identities import RequestIdentities
from vllm_ssdkv.connector.scheduler.request_overrides import RequestOverrides
from vllm_ssdkv.connector.scheduler.request_state import RequestState
from vllm_ssdkv.connector.scheduler.rewriter import NoRewrites, Rewriter
from vllm_ssdkv.connector.scheduler.slot_ledger import SlotLedger
from vllm_ssdkv.connector.scheduler.speculation import NO_SPECULATION, Speculation
from vllm_ssdkv.connector.scheduler.step_draft import StepDraft
from vllm_ssdkv.connector.scheduler.suspension import Suspension
from vllm_ssdkv.store.devices.wear import WearLedger
from vllm_ssdkv.store.own_store import OwnStore
from vllm_ssdkv.store.tier import StepIndex, TierIndex, TierSteps
from vllm_ssdkv.store.write_policy import WritePolicy

if TYPE_CHECKING:
    from vllm_ssdkv.connector.scheduler.kv_events import KVEvents
    from vllm_ssdkv.offload.xcache.x_rule import XShape


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts of the engine that do not change while it runs.

    Attributes:
        block_tokens: Tokens of a block.
        max_model_len: Tokens of a request, at most.
        ranks: Workers that write.
        speculation: Its drafts.
        finds: Whether requests may begin with stored blocks. Some models need all tokens of a
            request in one step, and an engine with the role ``kv_producer`` looks nothing up.
        stores: Whether blocks are stored in mode ``reuse``: not with the role ``kv_consumer``.
        selects: Whether requests may ask for a selector that ranks pages by their logits, and KV
            has 16 bits or more.
        sees_media: Whether the scheduler's process has the tensors of images and the like.
        x_share: Share of the running contexts that is stored as X, at most, or how it is found.
        x_shape: Shape of the layers, where it may be.
        hashes_per_block: vLLM's hashes to a block of ours: more than one where blocks of some KV
            cache groups have more tokens than those of others.
        kv_events: Whether vLLM publishes KV events.
        steps_ahead: Steps that vLLM plans before it takes the results of the first of them.
        sharers: Workers to each of ``ranks``, which read what that one writes.
        captures: Whether vLLM may capture whole steps of page mode, which choose in one way.
    """

    block_tokens: int
    max_model_len: int
    ranks: int
    speculation: Speculation = NO_SPECULATION
    finds: bool = True
    stores: bool = True
    selects: bool = True
    sees_media: bool = True
    x_share: float | Literal["auto"] = 0.0
    x_shape: XShape | None = None
    hashes_per_block: int = 1
    kv_events: bool = False
    steps_ahead: int = 1
    sharers: int = 1
    captures: bool = False


@dataclass(frozen=True, slots=True)
class SchedulerStore:
    """The store as the scheduler holds it: numbers of slots, no bytes.

    Attributes:
        index: Key to slot.
        steps: Its steps.
        suspension: Whether the store is to be left alone.
        write_policy: Admission and budgets of writes.
        counters: Metrics of this process.
        name_key: :meth:`StorePlace.name_key`.
        own: The store in this process; None: it is elsewhere.
    """

    index: TierIndex
    steps: TierSteps
    suspension: Suspension
    write_policy: WritePolicy
    counters: Counters
    name_key: bytes = b""
    own: OwnStore | None = None

    @classmethod
    def elsewhere(
        cls,
        config: SSDKVConfig,
        index: StepIndex,
        counters: Counters,
        way_out: str,
        name_key: bytes = b"",
    ) -> SchedulerStore:
        """A store that is not in this process. What is written there it decides; ``way_out`` as in
        :class:`Suspension`."""
        wear = WearLedger(None, [], counters)
        policy = WritePolicy(config, [], wear, [], index.num_slots, counters)
        suspension = Suspension(None, counters, lambda _: None, [], way_out=way_out)
        return cls(index, index, suspension, policy, counters, name_key)

    def close(self) -> None:
        """Make journal, manifest and the count of what was written durable, whichever fails."""
        with ExitStack() as stack:
            stack.callback(self.write_policy.close)
            stack.callback(self.index.close)
            if self.own is not None:
                stack.callback(self.own.rebalancer.close)


@dataclass(frozen=True, slots=True)
class SchedulerParts:
    """Parts that the core and the policy work with; all live as long as the scheduler.

    Attributes:
        config: Options of the engine.
        engine: Facts of it.
        store: The open store.
        requests: Requests that hold HBM blocks, by id.
        asked: Options of requests.
        draft: The next plan.
        identities: Weights and adapters.
        groups: KV cache groups of the model.
        slots: Slots of new blocks.
        loads: Loads under way.
        verifier: Comparison of hits with computed blocks.
        rewriter: Blocks of hits that are stored again.
        events: Events of stored blocks for routers, where vLLM publishes any.
    """

    config: SSDKVConfig
    engine: EngineFacts
    store: SchedulerStore
    requests: dict[str, RequestState]
    asked: RequestOverrides
    draft: StepDraft
    identities: RequestIdentities
    groups: BlockGroups
    slots: SlotLedger
    loads: LoadQueue
    verifier: HitVerifier
    rewriter: Rewriter | NoRewrites
    events: KVEvents | None = None
