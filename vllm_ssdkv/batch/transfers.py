"""Bodies that come in and go out: how many at a time, and how slow they may be.

Each holds a connection, a file and some hundred KiB. A client that sends or takes a byte now and
then would hold them for ever, and a thousand of them all that the server has.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Send

from vllm_ssdkv.base.sizes import KIB
from vllm_ssdkv.batch.api_error import ApiError

AT_A_TIME: Final = 64
"""Uploads and downloads together; a key has its share of them."""
GRACE_S: Final = 60.0
"""Extra time for a body beyond its time at ``SLOWEST``, and for a client to take one chunk."""
SLOWEST: Final = 16 * KIB
"""Bytes per second."""


class Transfers:
    """Transfers under way in this process. To be used on the event loop's thread only."""

    def __init__(self, share: float) -> None:
        """A key may have this share of them."""
        self._most = max(1, int(AT_A_TIME * share))
        self._of: Counter[bytes] = Counter()

    @contextlib.contextmanager
    def one(self, owner: bytes) -> Iterator[None]:
        """One of a key's, while the block lasts.

        Raises:
            ApiError: 429, there are too many.
        """
        if self._of[owner] >= self._most or self._of.total() >= AT_A_TIME:
            raise ApiError(
                429,
                f"{self._of[owner]} uploads and downloads of yours are under way; wait for some.",
                code="too_many_transfers",
            )
        self._of[owner] += 1
        try:
            yield
        finally:
            self._of[owner] -= 1
            if not self._of[owner]:
                del self._of[owner]


async def chunks(request: Request) -> AsyncIterator[bytes]:
    """The body of a request as it arrives.

    Raises:
        ApiError: 400, it was broken off; 408, it arrives too slowly.
    """
    begun, received = time.monotonic(), 0
    stream = aiter(request.stream())
    while True:
        left = begun + GRACE_S + received / SLOWEST - time.monotonic()
        try:
            async with asyncio.timeout(left):
                chunk = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise ApiError(
                408,
                f"The body has to arrive at {SLOWEST // KIB} KiB/s at least, and begin within "
                f"{GRACE_S:g} s.",
                code="too_slow",
            ) from None
        except ClientDisconnect:
            raise ApiError(400, "The request was broken off.") from None
        received += len(chunk)
        yield chunk


def patient(send: Send) -> Send:
    """The same, but a client that does not take a message within ``GRACE_S`` is given up.

    Raises:
        TimeoutError: by what is returned.
    """

    async def within(message: Message) -> None:
        async with asyncio.timeout(GRACE_S):
            await send(message)

    return within
