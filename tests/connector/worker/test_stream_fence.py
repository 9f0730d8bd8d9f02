"""The order of two threads' work on a GPU that is stood in for."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from vllm_ssdkv.connector.worker.stream_fence import StreamFence


@dataclass
class Stream:
    """Remembers what is queued on it."""

    queued: list[object] = field(default_factory=list)

    def wait_event(self, event: Event) -> None:
        self.queued.append(("after", event.stream, event.place))


@dataclass
class Event:
    stream: Stream | None = None
    place: int = -1

    def record(self, stream: Stream) -> None:
        self.stream, self.place = stream, len(stream.queued)


def test_nothing_on_the_cpu() -> None:
    fence = StreamFence(torch.device("cpu"))
    fence.set()
    fence.follow()


def test_a_load_comes_after_the_steps_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, loader = Stream(), Stream()
    current = [forward]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    fence = StreamFence(torch.device("cuda", 0))
    current[0] = loader
    fence.follow()
    assert loader.queued == [], "no step yet"
    for _ in range(2):
        current[0] = forward
        forward.queued.append("step")
        fence.set()
    forward.queued.append("a later step")
    current[0] = loader
    fence.follow()
    assert loader.queued == [("after", forward, 2)]
