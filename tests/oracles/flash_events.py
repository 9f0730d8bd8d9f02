"""Reads of pages as discrete events, on dies behind channels: what the closed form stands for."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import simpy

from vllm_ssdkv.offload.testing.flash import FlashTiming


def read_s(flash: FlashTiming, channels: Sequence[int]) -> float:
    """Seconds to the end of the last read of pages on these channels, all asked for at once.

    Pages of a channel are dealt to its dies. A read occupies its die while the page comes from the
    cells, then die and channel while it goes out.
    """
    env = simpy.Environment()
    wires = [simpy.Resource(env) for _ in range(flash.channels)]
    dies = [[simpy.Resource(env) for _ in range(flash.dies)] for _ in wires]
    seen = [0] * flash.channels

    def read(channel: int, die: simpy.Resource) -> Generator[simpy.Event, object, None]:
        with die.request() as turn:
            yield turn
            yield env.timeout(flash.read_s)
            with wires[channel].request() as way:
                yield way
                yield env.timeout(flash.page_bytes / flash.channel_bandwidth)

    for channel in channels:
        env.process(read(channel, dies[channel][seen[channel] % flash.dies]))
        seen[channel] += 1
    env.run()
    return float(env.now)
