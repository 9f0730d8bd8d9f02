"""Requests whose load failed: one more try, then their prompts are computed.

Before a load counts as failed, what was wrong is read again, from another copy where there is one:
``store/io/verified_read.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ssdkv.connector.scheduler.kv_groups import held_at_most

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


class LoadRetries:
    """Remembers them until they run or end. Used by the scheduler's thread.

    Attributes:
        step_blocks: :attr:`Speculation.step_blocks`.
    """

    def __init__(self, block_tokens: int, step_blocks: int = 0) -> None:
        self._block, self.step_blocks = block_tokens, step_blocks
        self._again: set[str] = set()
        """Those that have not asked again yet."""
        self._trying: set[str] = set()
        """Those whose next question is not answered from the store any more."""

    def __bool__(self) -> bool:
        """Check whether a request has still to ask again."""
        return bool(self._again)

    def add(self, request_id: str) -> None:
        """The load of this request failed: vLLM asks again."""
        self._again.add(request_id)

    def failed(self, request_id: str) -> bool:
        """Check whether the request has still to ask again."""
        return request_id in self._again

    def scheduled(self, request_id: str) -> None:
        """The request runs: nobody waits for it any more."""
        self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._again.discard(request_id)
        self._trying.discard(request_id)

    def __contains__(self, request_id: str) -> bool:
        """Check whether the request's load failed, and it has not run since."""
        return request_id in self._again or request_id in self._trying

    def given_up(self, request_id: str) -> bool:
        """Check whether the request is to be computed."""
        return request_id in self._trying

    def record_lookup(self, request_id: str) -> None:
        """The request asks what the store holds.

        After a failure that is one more try. If it fails too, or vLLM has no room for it, the
        prompt is computed.
        """
        if request_id in self._again:
            self._again.discard(request_id)
            self._trying.add(request_id)

    def must_wait(self, request: Request, hbm: KVCacheManager | None, others: bool) -> bool:
        """Keeps order after a load failed, which vLLM's scheduler does not expect.

        It keeps the blocks reserved that the failed load was admitted with, and admits no other
        load beside them: nobody overtakes the request. And it keeps the request in line before
        those that hold HBM blocks, and looks at none of them while the first does not fit: then
        the request lets them pass.

        Args:
            others: Whether any request holds HBM blocks.
        """
        failed = self._again | self._trying
        if hbm is None or not failed:
            return False
        if request.request_id not in failed:
            return True
        needed = 0
        for manager in hbm.coordinator.single_type_managers:
            tokens = manager.kv_cache_spec.block_size
            blocks = -(-request.num_tokens // tokens)
            needed += held_at_most(manager, blocks) + self.step_blocks * (self._block // tokens)
        return others and needed > hbm.block_pool.get_num_free_blocks()
