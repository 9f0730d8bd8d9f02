"""Parts of a selector: options, a budget, kernels and a scorer of pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from vllm_ssdkv.config.selectors import SELECTORS
from vllm_ssdkv.config.sparse import ScorerName, SparseConfig
from vllm_ssdkv.sparse.protocol import Budget, Selector
from vllm_ssdkv.sparse.scores import Scorer, ScoringKernels


@dataclass(frozen=True, slots=True)
class SelectorParts:
    """Parts for any selector.

    Attributes:
        options: The group ``sparse``, as the request sees it.
        budget: The most that may be chosen.
        head_size: Channels of a head.
        scorer_name: Selector whose summaries the store has.
        kernels: Makes the kernels of the queries' device.
    """

    options: SparseConfig
    budget: Budget
    head_size: int
    scorer_name: ScorerName
    kernels: Callable[[], ScoringKernels]

    def scorer(self) -> Scorer:
        """Scores pages by the summaries that the store has."""
        made: Scorer = SELECTORS.resolve(self.scorer_name).of(self)
        return made


class SelectorClass(Selector, Protocol):
    """Class of a selector as the option ``selector`` names it."""

    @classmethod
    def of(cls, parts: SelectorParts) -> Selector:
        """The selector as the options say."""
        ...
