"""A scheduler's view of a node that dies, stalls, comes back or is another."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.kit.clock import Clock
from tests.kit.waiting import until
from tests.node.client.scripted_node import SLOTS, Connection, ScriptedNode
from tests.node.waits import unknown
from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.node.client.awaited_chains import ASK_S, STALL_S, AwaitedChains
from vllm_ssdkv.node.client.node_link import START_S
from vllm_ssdkv.node.client.remote_index import RemoteIndex
from vllm_ssdkv.node.client.session import CALL_S
from vllm_ssdkv.node.protocol.channel import Frame
from vllm_ssdkv.node.protocol.messages import (
    Claim,
    Claimed,
    Done,
    Drop,
    Find,
    ForgetAll,
    Leave,
    Lookup,
    Message,
    Pin,
    Position,
    Slots,
    Touch,
    Unpin,
    pack,
    unpack,
    unpack_keys,
)
from vllm_ssdkv.store.index.slot_index import FULL, TAKEN, SlotState

KEYS = [bytes([i]) * 32 for i in range(6)]
STORED = {KEYS[0]: (3, 30), KEYS[1]: (4, 40)}


def answers(connection: Connection, message: Message, frame: Frame) -> Message | None:
    """A store with two blocks, one that is being written, and two free slots."""
    match message:
        case Lookup(keys):
            found = []
            for key in unpack_keys(keys):
                if key not in STORED:
                    break
                found.append(STORED[key])
            slots, epochs = zip(*found, strict=True) if found else ((), ())
            return Slots(pack(slots), pack(epochs))
        case Find(keys):
            each = [STORED.get(key, (-1, 0)) for key in unpack_keys(keys)]
            return Slots(pack([slot for slot, _ in each]), pack([epoch for _, epoch in each]))
        case Claim(keys):
            new = {KEYS[2]: (TAKEN, 0), KEYS[3]: (7, 70), KEYS[4]: (8, 80)}
            of = [
                (TAKEN, 0) if key in STORED else new.get(key, (FULL, 0))
                for key in unpack_keys(keys)
            ]
            slots, epochs = zip(*of, strict=True)
            return Claimed(pack(slots), pack(epochs))
        case ForgetAll():
            return Done()
        case _:
            return None


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ScriptedNode]:
    made = ScriptedNode(tmp_path, answers)
    yield made
    made.kill()


@pytest.fixture
def counters() -> Counters:
    return Counters()


def opened(node: ScriptedNode, counters: Counters, timeout: float = START_S) -> RemoteIndex:
    return RemoteIndex.open([node.peer("scheduler")], ["node"], counters, timeout=timeout)


@pytest.fixture
def index(node: ScriptedNode, counters: Counters) -> Iterator[RemoteIndex]:
    made = opened(node, counters)
    yield made
    made.close()


def of_kind(node: ScriptedNode, kind: type[Message]) -> list[Message]:
    return [message for message in node.told if isinstance(message, kind)]


def test_a_prefix_is_found_once_a_step(node: ScriptedNode, index: RemoteIndex) -> None:
    for _ in range(2):
        assert index.lookup(KEYS[:2]).tolist() == [3, 4]
    assert len(of_kind(node, Lookup)) == 1, "the second answer is remembered"
    assert index.epochs(np.array([3, 4])).tolist() == [30, 40]
    assert index.find(KEYS[1]) == 4
    assert index.key(4) == KEYS[1]
    index.step()
    assert index.find(KEYS[1]) is None
    assert index.lookup(KEYS).tolist() == [3, 4]
    assert len(of_kind(node, Lookup)) == 2


def test_claims_are_pinned_and_given_back(node: ScriptedNode, index: RemoteIndex) -> None:
    assert index.claim(KEYS[1:]).tolist() == [TAKEN, TAKEN, 7, 8, FULL]
    assert index.state(7) is SlotState.READY
    assert index.holds(7, 70)
    assert not index.holds(7, 71)
    index.drop(np.array([8, 9]))
    assert index.state(8) is SlotState.FREE
    index.unpin(np.array([7, 8, 9]))
    until(lambda: of_kind(node, Unpin))
    assert of_kind(node, Drop) == [Drop(pack([8]), pack([80]), "engine")]
    assert of_kind(node, Unpin) == [Unpin(pack([7, 8]), pack([70, 80]))]


def test_what_needs_no_answer_is_told_in_order(node: ScriptedNode, index: RemoteIndex) -> None:
    index.touch_chain(KEYS[:2])
    index.pin(index.lookup(KEYS[:1]))
    assert index.last(KEYS, 0, 4, [0]) == 2
    kinds = [type(message) for message in node.told]
    assert kinds == [Touch, Lookup, Pin, Find]
    (pin,) = of_kind(node, Pin)
    assert isinstance(pin, Pin)
    assert (unpack(pin.slots).tolist(), unpack(pin.epochs).tolist()) == ([3], [30])


def test_a_node_that_is_gone_has_nothing_and_comes_back(
    node: ScriptedNode, index: RemoteIndex, counters: Counters
) -> None:
    index.pin(index.lookup(KEYS[:2]))
    node.kill()
    index.step()
    begun = time.monotonic()
    assert index.lookup(KEYS).tolist() == []
    assert index.claim(KEYS).tolist() == [TAKEN] * len(KEYS)
    assert index.last(KEYS, 0, 4, [0]) == 0
    assert time.monotonic() - begun < 3 * CALL_S, "three deadlines"
    assert counters.total("stores_skipped", cause="node") == len(KEYS)
    until(lambda: counters.total("node_sessions_lost") == 1)
    node.told.clear()
    node.start()
    until(lambda: index.lookup(KEYS).tolist() == [3, 4])
    index.unpin(np.array([3, 4]))
    index.pin(np.array([3]))
    until(lambda: of_kind(node, Pin))
    assert not of_kind(node, Unpin), "pins of the session before are not undone in this one"


def test_pins_of_a_session_that_has_ended_are_not_those_of_the_next(
    node: ScriptedNode, index: RemoteIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that pinned before the node started again ends after another one has pinned."""
    before = index.lookup(KEYS[:2])
    index.pin(before)
    assert index.claim(KEYS[3:4]).tolist() == [7]
    node.kill()
    until(lambda: index.claim(KEYS[:1]).tolist() == [TAKEN] and index.epoch(3) == 0)
    node.start()
    monkeypatch.setitem(STORED, KEYS[0], (3, 31))
    monkeypatch.setitem(STORED, KEYS[1], (7, 71))
    index.step()
    until(lambda: index.lookup(KEYS[:2]).tolist() == [3, 7])
    index.pin(np.array([3, 7]))
    node.told.clear()
    index.unpin(np.array([*before, 7]))
    assert index.claim(KEYS[:1]).tolist() == [TAKEN]  # whatever was told before it has come
    assert not of_kind(node, Unpin)
    index.unpin(np.array([3, 7]))
    until(lambda: of_kind(node, Unpin))
    assert of_kind(node, Unpin) == [Unpin(pack([3, 7]), pack([31, 71]))]
    index.unpin(np.array([3, 7]))  # nobody has pinned them any more
    assert index.claim(KEYS[:1]).tolist() == [TAKEN]
    assert len(of_kind(node, Unpin)) == 1


def test_pins_have_the_epochs_under_which_they_were_pinned(
    node: ScriptedNode, index: RemoteIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node had given the slot to another block before it heard of the first pin."""
    index.pin(index.lookup(KEYS[:1]))
    monkeypatch.setitem(STORED, KEYS[0], (3, 31))
    index.step()
    index.pin(index.lookup(KEYS[:1]))
    for _ in range(2):
        index.unpin(np.array([3]))
    until(lambda: len(of_kind(node, Unpin)) == 2)
    assert of_kind(node, Pin) == [Pin(pack([3]), pack([epoch])) for epoch in (30, 31)]
    assert of_kind(node, Unpin) == [Unpin(pack([3]), pack([epoch])) for epoch in (30, 31)]


def test_a_promised_load_can_be_planned_without_the_node(
    node: ScriptedNode, index: RemoteIndex
) -> None:
    slots = index.lookup(KEYS[:2])
    node.kill()
    until(lambda: index.claim(KEYS[:1]).tolist() == [TAKEN] and index.epoch(3) == 0)
    assert index.lookup(KEYS[:2]).tolist() == slots.tolist()
    assert index.epochs(slots).tolist() == [0, 0], "no block has this epoch: the load fails"


def test_a_node_that_stalls_costs_one_deadline(node: ScriptedNode, index: RemoteIndex) -> None:
    node.stopped.set()
    begun = time.monotonic()
    assert index.lookup(KEYS).tolist() == []
    assert time.monotonic() - begun < 2 * CALL_S + 1
    begun = time.monotonic()
    for _ in range(20):
        assert index.lookup(KEYS).tolist() == []
    assert time.monotonic() - begun < 20 * CALL_S, "twenty deadlines"
    node.stopped.clear()
    until(lambda: index.lookup(KEYS).tolist() == [3, 4])


def test_an_answer_to_something_else_ends_the_session(tmp_path: Path, counters: Counters) -> None:
    node = ScriptedNode(tmp_path, lambda *_: Position(1))
    index = opened(node, counters)
    assert index.lookup(KEYS).tolist() == []
    assert counters.total("node_call_failures") == 1
    index.close()
    node.kill()


@pytest.mark.parametrize(
    "answer",
    [
        Slots(pack([3, 4]), pack([30])),
        Slots(pack([3, 4, 5]), pack([30, 40, 50])),
        Slots(b"odd", b""),
        Claimed(pack([7]), pack([70])),
        Claimed(pack([7, 8]), pack([70])),
        Claimed(b"", b"odd"),
    ],
)
def test_an_answer_that_cannot_be_ends_the_session(
    tmp_path: Path, counters: Counters, answer: Slots | Claimed
) -> None:
    node = ScriptedNode(tmp_path, lambda *_: answer)
    index = opened(node, counters)
    session = index.members[0].link.session
    if isinstance(answer, Slots):
        assert index.lookup(KEYS[:2]).tolist() == []
    else:
        assert index.claim(KEYS[:2]).tolist() == [TAKEN, TAKEN]
    assert session is not None
    assert session.ended
    index.close()
    node.kill()


def test_slots_beyond_the_store_are_not_used(node: ScriptedNode, counters: Counters) -> None:
    node.slots = 4
    index = opened(node, counters)
    assert index.lookup(KEYS).tolist() == [3]
    assert index.claim(KEYS[3:5]).tolist() == [FULL, FULL]
    until(lambda: of_kind(node, Unpin))
    index.close()


@pytest.mark.parametrize("fault", ["nobody", "version"])
def test_a_start_without_its_node_says_why(tmp_path: Path, fault: str, counters: Counters) -> None:
    node = ScriptedNode(tmp_path, answers)
    node.version = 77
    if fault == "nobody":
        node.kill()
    with pytest.raises(StoreError, match=r"node\.sock") as caught:
        opened(node, counters, 0.5)
    assert ("77" in str(caught.value)) == (fault == "version")
    node.kill()


def test_a_request_waits_for_what_others_compute(
    node: ScriptedNode, index: RemoteIndex, counters: Counters
) -> None:
    clock, others = Clock(), 3
    index._chains = AwaitedChains(clock)

    def busy(connection: Connection, message: Message, frame: Frame) -> Message | None:
        answer = answers(connection, message, frame)
        if isinstance(message, Lookup) and isinstance(answer, Slots):
            assert message.chain
            left = 0 if message.take_over else others
            return Slots(answer.slots, answer.epochs, left)
        return answer

    node.script = busy
    assert index.awaits("a", KEYS, unknown)
    assert index.awaits("a", KEYS, unknown), "and asks nobody so soon"
    assert len(of_kind(node, Lookup)) == 1
    others = 0
    clock.sleep(2 * ASK_S)
    assert not index.awaits("a", KEYS, unknown)
    assert counters.total("prefix_waits", end="served") == 1
    asked = len(of_kind(node, Lookup))
    assert index.lookup(KEYS).tolist() == [3, 4]
    assert len(of_kind(node, Lookup)) == asked, "the answer is known"
    others = 3
    assert index.awaits("b", KEYS, lambda: 0.0)
    clock.sleep(STALL_S)
    assert not index.awaits("b", KEYS, lambda: 0.0)
    assert counters.total("prefix_waits", end="taken_over") == 1
    index.computes_no_more("b")
    until(lambda: Leave(2) in node.told)


def test_numbers_of_the_store_are_the_nodes_to_tell(index: RemoteIndex, counters: Counters) -> None:
    assert not [name for name in counters.take_gauges() if "slots" in name or "journal" in name]
    assert counters.total("slots_stored") == 0
    index.durable(np.array([3, 4]))
    assert counters.total("slots_stored") == 2
    assert index.num_slots == SLOTS


def test_a_node_that_is_gone_is_noticed_by_an_idle_engine(
    node: ScriptedNode, index: RemoteIndex, counters: Counters
) -> None:
    until(lambda: node.looks)
    node.kill()
    until(lambda: counters.total("node_sessions_lost") == 1)


def test_a_reset_is_told_to_each_later_session_first(
    node: ScriptedNode, index: RemoteIndex, counters: Counters
) -> None:
    assert index.lookup(KEYS[:1]).tolist() == [3]
    index.forget_stored()
    assert index.find(KEYS[0]) is None, "what was found is forgotten, too"
    assert len(of_kind(node, ForgetAll)) == 1
    node.kill()
    until(lambda: counters.total("node_sessions_lost") == 1)
    node.told.clear()
    node.start()
    until(lambda: len(index.lookup(KEYS[:1])))
    assert [type(message) for message in node.told[:2]] == [ForgetAll, Lookup]


def test_a_session_that_cannot_be_told_of_a_reset_is_not_used(
    node: ScriptedNode, index: RemoteIndex
) -> None:
    node.script = lambda connection, message, frame: (
        Touch(b"") if isinstance(message, ForgetAll) else answers(connection, message, frame)
    )
    index.forget_stored()
    assert index.lookup(KEYS[:1]).tolist() == []
    assert of_kind(node, Lookup) == []
