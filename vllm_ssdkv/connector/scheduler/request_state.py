"""State of one request in the scheduler."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_ssdkv.config.request import RequestOptions
from vllm_ssdkv.connector.messages import Row

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_ssdkv.connector.scheduler.kv_groups import GroupLoad


@dataclass(slots=True)
class RequestState:
    """One admitted request. Block indices count from the request's first token.

    Attributes:
        request: vLLM's request; its ``block_hashes`` grow as tokens become known.
        block_ids: vLLM's: of each KV cache group, the HBM block of each of the group's blocks; 0,
            the null block, or one that vLLM has taken back since, behind the window.
        published: Blocks looked at for storing so far.
        computed: Tokens computed when the steps scheduled so far have ended.
        slots: Page mode: slot of each completed block, pinned for the request.
        private: Page mode: block index to slot, for blocks whose hash is not known yet.
        cut_off: Page mode: there was no slot for a block, so that those after it are not stored.
        reserved: Page mode: slots set aside for blocks still to come.
        hit: Blocks that were in HBM, or were loaded, when it began to compute.
        loaded_from: First block that came from the store; -1: none did.
        load: Of these blocks; in reuse mode, while it is under way.
        born: Step for which it was admitted; a preemption told later than that ended its
            previous life.
        as_x: Page mode: stored as X.
        running: Scheduled since it was admitted, and not preempted.
    """

    request: Request
    block_ids: list[list[int]] = field(default_factory=list)
    published: int = 0
    computed: int = 0
    slots: list[int] = field(default_factory=list)
    private: dict[int, int] = field(default_factory=dict)
    cut_off: bool = False
    reserved: int = 0
    hit: int = 0
    loaded_from: int = -1
    load: GroupLoad | None = None
    born: int = 0
    as_x: bool = False
    running: bool = False
    _live_from: int = 0

    @property
    def request_id(self) -> str:
        """vLLM's id of the request."""
        return str(self.request.request_id)

    @property
    def known(self) -> int:
        """As :attr:`computed`, without tokens that are drafts."""
        return min(self.computed, int(self.request.num_tokens))

    def first_live_block(self) -> int:
        """Index of the first block that was ever in HBM in this life of the request.

        After a hit the blocks before the window are null from the start.
        """
        (block_ids,) = self.block_ids
        while self._live_from < len(block_ids) and block_ids[self._live_from] == 0:
            self._live_from += 1
        return self._live_from

    def row(
        self,
        computed: int,
        count: int,
        block_tokens: int,
        window_tokens: int,
        asked: RequestOptions | None,
    ) -> Row:
        """Page mode: what the workers must know of this request in a step that computes ``count``
        tokens after the first ``computed``."""
        start = max(0, computed - window_tokens + 1) // block_tokens
        start = max(start, self.first_live_block())
        (block_ids,) = self.block_ids
        fence = block_ids[(computed - 1) // block_tokens] if computed else 0
        block = block_ids[computed // block_tokens]
        of_prompt = computed < self.request.num_prompt_tokens
        return Row(
            self.request_id, block, fence, computed, start, count, asked, of_prompt, self.as_x
        )

    def discard_in_flight_output(self) -> None:
        """Have vLLM drop what the request samples in steps that are under way.

        They attend to what could not be read, as the step did that told of it. vLLM recognises
        that one by an invalid block, but not the next, which it has scheduled already on a GPU.
        This is the mark that it sets itself when it preempts a request.
        """
        if self.running:
            self.request.num_stale_output_tokens = self.request.num_in_flight_tokens
            self.request.drop_stale_output = True


def being_computed(
    states: Iterable[RequestState], loading: Container[str]
) -> Iterator[tuple[int, int]]:
    """(computed, all) tokens of the requests that are before every one still waiting: those whose
    hits are not ``loading``."""
    for state in states:
        if state.request_id not in loading:
            yield state.request.num_computed_tokens, state.request.num_tokens
