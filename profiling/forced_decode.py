"""Teacher forcing in vLLM: a logits processor that makes requests decode given tokens.

Log-probabilities of the whole vocabulary are kept as the model gives them, float32, before anything
is forced. vLLM returns the same with ``logprobs=-1``, as a dictionary of one Python object per word
and token: 50,000 of them for each of 255 tokens of a document are minutes and gigabytes. Here a row
is one copy of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from vllm_ssdkv.base.errors import BenchError

if TYPE_CHECKING:
    from vllm import SamplingParams

FORCED: Final = "ssdkv_forced"
"""Key of ``SamplingParams.extra_args``: the name of a request in :data:`FORCINGS`."""


@dataclass(slots=True)
class Forcing:
    """Tokens to force on a request.

    >>> Forcing((2, 0)).force([], torch.zeros(3)).argmax().item()
    2
    """

    forced: tuple[int, ...]

    def force(self, output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Logits that leave one token possible, the one behind ``output``."""
        if len(output) >= len(self.forced):
            return logits
        only = torch.full_like(logits, float("-inf"))
        only[self.forced[len(output)]] = 0
        return only


@dataclass(slots=True)
class Record(Forcing):
    """Tokens to force on a request, and what the model gave for them.

    Attributes:
        rows: Log-probabilities, float32 ``[forced tokens, vocabulary]``; empty before the first.
        seen: Which of them were computed.
    """

    rows: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    seen: set[int] = field(default_factory=set)

    def force(self, output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Keep the log-probabilities of the next token, then leave one token possible.

        A prompt that is computed in chunks comes here once per chunk; the last one counts.
        """
        step = len(output)
        if step < len(self.forced):
            if not len(self.rows):
                self.rows = torch.empty(len(self.forced), len(logits), dtype=torch.float32)
            self.rows[step] = logits.log_softmax(-1, dtype=torch.float32)
            self.seen.add(step)
        return Forcing.force(self, output, logits)

    def whole(self, name: str, tokens: Sequence[int]) -> torch.Tensor:
        """All rows, after the request decoded ``tokens``.

        Raises:
            BenchError: others than the forced ones, or a row was not computed.
        """
        if tuple(tokens) != self.forced or len(self.seen) != len(self.forced):
            raise BenchError(
                f"{name}: {len(tokens)} tokens were decoded and {len(self.seen)} recorded of "
                f"{len(self.forced)} to force"
            )
        return self.rows


FORCINGS: Final[dict[str, Forcing]] = {}
"""Forcings of this process's requests, by the name in their ``extra_args``. The engine core has to
be in the process that fills it."""


class ForcedDecode(AdapterLogitsProcessor):
    """The processor, given to vLLM as ``logits_processors=[ForcedDecode]``."""

    def is_argmax_invariant(self) -> bool:
        """It decides what is sampled."""
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        """The forcing of a request that asks for it."""
        name = (params.extra_args or {}).get(FORCED)
        return None if name is None else FORCINGS[name].force
