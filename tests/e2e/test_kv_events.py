"""KV events of a real engine over ZMQ, as vLLM publishes them and has them replayed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import zmq
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)
from vllm.v1.core.kv_cache_utils import ExternalBlockHash

from tests.e2e.workload import SHORT, reuse_mode
from tests.kit.engine import MAX_TOKENS, Engine, Tokens

BLOCK = 32
KV_TOKENS = 16384
DEADLINE_S = 60.0

Devices = Callable[..., list[dict[str, str]]]
Prefixes = set[tuple[int, ...]]


class Subscriber:
    """Index of a router: which prefixes lie on which medium, all of them since the start."""

    def __init__(self, endpoint: str):
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)

    def close(self) -> None:
        self._socket.close()

    def replay(self) -> dict[str, Prefixes]:
        decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
        self._socket.send_multipart([b"", (0).to_bytes(8, "big")])
        prefixes: dict[ExternalBlockHash, tuple[int, ...]] = {}
        held: dict[str, set[ExternalBlockHash]] = {}
        while True:
            _, _, sequence, payload = self._socket.recv_multipart()
            if sequence == ZmqEventPublisher.END_SEQ:
                return {m: {prefixes[one] for one in hashes} for m, hashes in held.items()}
            for event in decoder.decode(payload).events:
                on = held.setdefault(event.medium, set())
                if not isinstance(event, BlockStored):
                    on.difference_update(event.block_hashes)
                    continue
                before = event.parent_block_hash
                tokens = () if before is None else prefixes[before]
                for number, one in enumerate(event.block_hashes):
                    first = number * event.block_size
                    tokens = (*tokens, *event.token_ids[first : first + event.block_size])
                    assert prefixes.setdefault(one, tokens) == tokens
                on.update(event.block_hashes)

    def awaits(self, medium: str, wanted: Prefixes) -> dict[str, Prefixes]:
        """Replay until a medium holds this, and nothing else: the publisher has a thread."""
        end = time.monotonic() + DEADLINE_S
        while (found := self.replay()).get(medium, set()) != wanted:
            assert time.monotonic() < end, found.get(medium, set()) ^ wanted
            time.sleep(0.1)
        return found


def prefixes(texts: Iterable[Tokens]) -> Prefixes:
    """All whole blocks of these, each with what lies before it."""
    return {tuple(text[:end]) for text in texts for end in range(BLOCK, len(text) + 1, BLOCK)}


def test_a_replayed_index_is_what_the_store_holds(
    models: dict[str, Path], devices: Devices, tmp_path: Path
) -> None:
    place = devices(2)
    events = KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"ipc://{tmp_path}/events",
        replay_endpoint=f"ipc://{tmp_path}/replay",
    )
    subscriber = Subscriber(f"ipc://{tmp_path}/replay")

    def engine() -> Engine:
        options = reuse_mode(place)
        return Engine(models["llama"], ssdkv=options, kv_tokens=KV_TOKENS, kv_events_config=events)

    with engine() as first:
        answers = first.answers(SHORT)
        first.settle()
        # The KV of the last token was never computed.
        texts = [[*prompt, *a.tokens][:-1] for prompt, a in zip(SHORT, answers, strict=True)]
        assert all(len(a.tokens) == MAX_TOKENS for a in answers)
        found = subscriber.awaits(MEDIUM_STORAGE, prefixes(texts))
        # The scheduler learns from the first report how much DRAM there is.
        assert found[MEDIUM_CPU]
        assert found[MEDIUM_CPU] <= prefixes(texts)
        assert found[MEDIUM_GPU] >= prefixes(texts)
    with engine() as another:  # which tells of what it has when it is asked for it
        another.answers(SHORT[:1])
        another.settle()
        subscriber.awaits(MEDIUM_STORAGE, prefixes(texts[:1]))
    subscriber.close()
