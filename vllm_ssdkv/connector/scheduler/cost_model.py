"""Costs of computing and loading: learnt from the engine's own steps and from real loads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_ssdkv.connector.messages import LoadTime
from vllm_ssdkv.connector.scheduler.linear_fit import LinearFit


@dataclass(frozen=True, slots=True)
class StepShape:
    """The work of one step.

    Attributes:
        tokens: All that are computed.
        prefill: Pairs of a token and one that it attends to, over rows of more than one token.
        decode: The same over rows of one token, which cost more per pair: each reads all of its
            context for itself.
    """

    tokens: int
    prefill: float
    decode: int

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int]]) -> StepShape:
        """Build from (tokens before the row, tokens of the row) pairs."""
        tokens = decode = 0
        prefill = 0.0
        for before, count in rows:
            tokens += count
            if count == 1:
                decode += before
            else:
                prefill += pairs(before, before + count)
        return cls(tokens, prefill, decode)

    @property
    def kind(self) -> tuple[int, int]:
        """Steps of about the same size and the same context."""
        context = int(self.prefill + self.decode) // max(1, self.tokens)
        return self.tokens.bit_length(), context.bit_length() // 2


def pairs(start: int, stop: int) -> float:
    """Pairs of tokens of which one attends to the other, for tokens ``start`` to ``stop`` of one
    request."""
    return (stop - start) * (start + stop) / 2


class PrefillCost:
    """Seconds of a forward pass: so much per step, per token and per pair of tokens.

    Steps are mixed: rows that decode ride along. Both kinds of work have weights of their own.
    """

    def __init__(self, chunk_tokens: int):
        """``chunk_tokens``: most tokens of one step."""
        self._chunk = chunk_tokens
        self._fit = LinearFit((1.0, 0.01, 0.1, 0.1), keep=3, half_life=32)
        self._prefills = 0

    @property
    def known(self) -> bool:
        """Check whether any prefill was measured."""
        return self._prefills > 0

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step took so long."""
        self._prefills += shape.prefill > 0
        features = (1.0, shape.tokens, shape.prefill, shape.decode)
        self._fit.observe(features, seconds, shape.kind)

    def seconds(self, start: int, stop: int, after: int = 0) -> float:
        """Seconds that tokens ``start`` to ``stop`` of a request add, ``after`` more follow in any
        case."""
        step, token, pair, _ = self._fit.weights().tolist()
        steps = -(-(stop - start + after) // self._chunk) - -(-after // self._chunk)
        return float(steps * step + (stop - start) * token + pairs(start, stop) * pair)

    def backlog(self, running: Iterable[tuple[int, int]]) -> float:
        """Seconds left for requests with (computed, all) tokens, beside each other in one batch."""
        step, token, pair, _ = self._fit.weights().tolist()
        tokens, work = 0, 0.0
        for computed, total in running:
            tokens += max(0, total - computed)
            work += max(0.0, pairs(computed, total))
        return float(tokens // self._chunk * step + tokens * token + work * pair)

    @property
    def tokens_per_second(self) -> float:
        """Rate of a full chunk without context; 0 when nothing is known."""
        seconds = self.seconds(0, self._chunk) if self.known else 0.0
        return self._chunk / seconds if seconds else 0.0


class LoadCost:
    """Seconds of a load: from the devices, from DRAM, and for the way there and back.

    The last one is what the request waits although nothing is read or copied: its load starts at
    the end of a step, and is noticed at the end of another.
    """

    _KEEP = 16
    _HALF_LIFE = 4.0
    _BELIEVE_AFTER = 2
    """A drive that turned slow, or fast again, is believed after two loads."""

    def __init__(self) -> None:
        self._ssd = self._fit((1.0, 1.0))
        self._dram = self._fit((1.0, 1.0))
        self._way = self._fit((1.0,))

    def _fit(self, doubts: tuple[float, ...]) -> LinearFit:
        return LinearFit(
            doubts,
            keep=self._KEEP,
            half_life=self._HALF_LIFE,
            believe_after=self._BELIEVE_AFTER,
        )

    @property
    def known(self) -> bool:
        """Check whether any load was measured."""
        return self._ssd.count + self._dram.count > 0

    def observe(self, time: LoadTime, waited: float | None) -> None:
        """A load ended, ``waited`` seconds after it was planned; None: nobody waited for it."""
        if time.tokens_from_ssd:
            self._ssd.observe((1.0, time.tokens_from_ssd), time.ssd_s)
        if time.tokens_from_dram:
            self._dram.observe((1.0, time.tokens_from_dram), time.dram_s)
        if waited is not None:
            self._way.observe((1.0,), waited - time.queued_s - time.loading_s)

    def service(self, dram_tokens: int, ssd_tokens: int) -> float:
        """Seconds that the loader is busy. What was never measured costs nothing: try it."""
        seconds = 0.0
        if ssd_tokens:
            seconds += self._ssd.predict((1.0, ssd_tokens))
        if dram_tokens:
            seconds += self._dram.predict((1.0, dram_tokens))
        return seconds

    @property
    def way(self) -> float:
        """Seconds for the way there and back."""
        return self._way.predict((1.0,))

    @property
    def latency(self) -> float:
        """Seconds that a load from the devices takes, however small."""
        return self.way + float(self._ssd.weights()[0])

    @property
    def tokens_per_second(self) -> float:
        """Rate of a large load from the devices; 0 when none was measured."""
        seconds = float(self._ssd.weights()[1])
        return 1.0 / seconds if seconds else 0.0
