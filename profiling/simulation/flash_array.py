"""Inside of a drive as discrete events: reads and programs of pages on dies behind channels.

A read occupies its die while the page comes from the cells, then die and channel while it goes out.
A program takes the channel first, then the die for as long as it lasts. So what is written makes
reads wait, on that die only, and a channel carries one page at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

import simpy

from vllm_ssdkv.profiling.simulation.hardware import Flash
from vllm_ssdkv.profiling.simulation.servers import Events, Server, Usage


class FlashArray:
    """Dies and channels of a drive. Page ``n`` lies on channel ``n mod channels``.

    Example:
        array = FlashArray(find(Flash, "970pro-class"))
        array.run(reads=range(1024), programs=())
    """

    def __init__(self, flash: Flash) -> None:
        self.flash = flash
        self.env = simpy.Environment()
        self.channels = [Server(self.env, f"channel {n}") for n in range(flash.channels)]
        count = flash.channels * flash.dies
        self.dies = [simpy.PriorityResource(self.env) for _ in range(count)]
        self.stays: list[float] = []

    def run(self, reads: Iterable[int], programs: Iterable[int]) -> float:
        """Read and program these pages, all asked for at once; seconds to the end of the last.

        ``stays`` has the seconds of each read, in the order of their ends.
        """
        begin = self.env.now
        work = [self.env.process(self._program(page)) for page in programs]
        work += [self.env.process(self._read(page)) for page in reads]
        self.env.run(self.env.all_of(work))
        return self.env.now - begin

    def usage(self) -> list[Usage]:
        """Work of each channel."""
        return [channel.usage() for channel in self.channels]

    def _die(self, page: int) -> simpy.PriorityResource:
        return self.dies[page % len(self.dies)]

    def _transfer(self, page: int) -> Events:
        flash = self.flash
        seconds = flash.page_bytes / flash.channel_bandwidth
        yield from self.channels[page % flash.channels].work(seconds, nbytes=flash.page_bytes)

    def _read(self, page: int) -> Events:
        begin = self.env.now
        # Reads go before programs that wait; one under way is not interrupted.
        with self._die(page).request(priority=0) as turn:
            yield turn
            yield self.env.timeout(self.flash.read_s)
            yield from self._transfer(page)
        self.stays.append(self.env.now - begin)

    def _program(self, page: int) -> Events:
        with self._die(page).request(priority=1) as turn:
            yield turn
            yield from self._transfer(page)
            yield self.env.timeout(self.flash.program_s)
