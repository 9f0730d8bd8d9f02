"""Connections for attention follow the sessions of their nodes."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.kit.waiting import until
from tests.node.protocol.linked import Ends, linked
from vllm_ssdkv.base.errors import NodeGoneError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.node.client.attention import AttentionWire
from vllm_ssdkv.node.protocol.messages import Attend, AttendRoom, AttendShape, pack
from vllm_ssdkv.offload.node import NodeWires
from vllm_ssdkv.offload.node_blocks import NodeBlocks

SHAPE = AttendShape(1, 1, 1, 16, 1, 8, "float32", 100)


class Link:
    """Stands for the link to the volumes of one node, whose session is ``session``."""

    def __init__(self) -> None:
        self.peer = SimpleNamespace(address="a node")
        self.session: object | None = object()
        self.told: list[Callable[[bool], None]] = []

    def tell(self, here: bool) -> None:
        self.session = object() if here else None
        for tell in self.told:
            tell(here)

    def tell_changes(self, tell: Callable[[bool], None]) -> None:
        self.told.append(tell)
        tell(self.session is not None)


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Ends | Exception]]:
    """Both ends of all connections that were opened; an error that is put here comes once."""
    found: list[Any] = []
    with ExitStack() as stack:

        def connect(session: object, shape: AttendShape, timeout: float) -> AttentionWire:
            del session, shape, timeout
            if found and isinstance(found[-1], Exception):
                raise found.pop()
            place = tmp_path / str(len(found))
            place.mkdir()
            found.append(stack.enter_context(linked("unix", place, place)))
            return AttentionWire(found[-1].engine, AttendRoom(100, 100))

        monkeypatch.setattr(AttentionWire, "open", connect)
        yield found


def wires_of(link: Link, counters: Counters) -> NodeWires:
    links: Any = [link]
    return NodeWires(links, SHAPE, counters)


def test_who_waits_for_a_node_that_is_gone_waits_no_longer(opened: list[Any]) -> None:
    link = Link()
    wires = wires_of(link, Counters())
    wire = wires.current()[0]
    assert wire is not None
    call = wire.send(Attend(0, 1.0, pack([1]), b""), 5.0)
    timer = threading.Timer(0.05, link.tell, [False])
    timer.start()
    began = time.monotonic()
    with pytest.raises(NodeGoneError):
        wire.receive(call, time.monotonic() + 20.0)
    assert time.monotonic() - began < 10
    timer.join()
    assert wires.current() == [None]
    link.tell(True)
    until(lambda: wires.current()[0] is not None)
    assert wires.current()[0] is not wire
    assert len(opened) == 2
    assert wires.close(5.0)


def test_a_node_that_goes_while_wires_begin_is_known_to_be_gone(opened: list[Any]) -> None:
    class Gone(Link):
        def tell_changes(self, tell: Callable[[bool], None]) -> None:
            self.session = None
            super().tell_changes(tell)

    wires = wires_of(Gone(), Counters())
    assert wires.current() == [None]
    assert len(opened) == 1
    assert wires.close(5.0)


def test_an_error_that_nothing_foresaw_ends_no_thread(opened: list[Any]) -> None:
    link, counters = Link(), Counters()
    wires = wires_of(link, counters)
    link.tell(False)
    opened.append(OSError(errno.EMFILE, "too many open files"))
    link.tell(True)
    until(lambda: wires.current()[0] is not None)
    assert counters.total("thread_errors", thread="node") == 1
    assert wires.close(5.0)


def test_a_slot_that_was_reclaimed_has_no_device_to_suspect() -> None:
    geometry = SimpleNamespace(kv_pages=2)
    drives: Any = SimpleNamespace(links=[], node_of=[0, 1], drive_of=[0, 0])
    files: Any = SimpleNamespace(geometry=geometry)
    checksums: Any = None
    blocks = NodeBlocks(files, checksums, drives, slots=10)
    slots = np.array([3, 3])
    assert blocks.devices_of(slots, np.array([0, 1]), node=1).tolist() == [-1, -1]
