"""Interface of the endpoints to the runner: a reply to a request, or word that there is none."""

from __future__ import annotations

from typing import Any, Protocol

from vllm_ssdkv.base.errors import SSDKVError
from vllm_ssdkv.batch.answers import Reply


class NoReplyError(SSDKVError):
    """Engine or server end before the answer: the request has none, and may be sent again."""


class AbortedError(NoReplyError):
    """The engine goes on, but has aborted the request, as when somebody pauses it."""


class Answering(Protocol):
    """Something that answers requests, on the event loop."""

    async def answer(self, endpoint: str, body: dict[str, Any]) -> Reply:
        """The reply of an endpoint, errors of the request included.

        Raises:
            NoReplyError: the engine has ended or the server is stopping.
            AbortedError: it has aborted this request only.
        """
