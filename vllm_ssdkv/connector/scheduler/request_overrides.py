"""Options that requests ask for themselves (``config/request.py``), from their arrival to their
end.

A connector cannot refuse a request: vLLM asks it for the first time in the engine core, where an
exception ends the engine. A request that asks for what cannot be is served exactly, which is never
worse than what it wanted, and its answer says so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.request import NAME, RequestOptions

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

EXACT: Final = RequestOptions(selector="exact")
_MAX_CHARS: Final = 500


@dataclass(frozen=True, slots=True)
class Choice:
    """Choice of a request that does not attend to everything while it is decoded.

    Attributes:
        digest: :attr:`SSDKVConfig.choice`.
        exact_below: Requests of fewer tokens attend to everything.
    """

    digest: bytes
    exact_below: int

    @classmethod
    def of(cls, config: SSDKVConfig) -> Choice | None:
        """The choice by these options; None: they attend to everything."""
        digest = config.choice
        return cls(digest, config.exact_below) if digest else None


class RequestOverrides:
    """Overrides by request. Used by the scheduler's thread."""

    def __init__(
        self,
        config: SSDKVConfig,
        counters: Counters,
        selects: bool = True,
        retains: bool = True,
        captures: bool = False,
    ):
        """``selects``, ``captures``: see ``EngineFacts``; ``retains``: the engine has its own
        store."""
        self._config = config
        self._counters = counters
        self._selects, self._retains, self._captures = selects, retains, captures
        self._own = Choice.of(config)
        self._asked: dict[str, RequestOptions] = {}
        self._choices: dict[str, Choice | None] = {}
        self._refused: dict[str, str] = {}
        self._retained: dict[str, int] = {}
        self._told = ""

    def __len__(self) -> int:
        """Requests that asked for something and have not ended."""
        return len(self._asked.keys() | self._retained.keys())

    def arrived(self, request: Request) -> None:
        """Take in what a new request asks for, if anything."""
        params, hints = request.kv_transfer_params, request.kv_hints
        given = params.get(NAME) if isinstance(params, Mapping) else None
        if given is None and hints is None:
            return
        name = str(request.request_id)
        try:
            if given is not None:
                asked = RequestOptions.of(
                    given, self._config, selects=self._selects, captured=self._captures
                )
                # Workers tell choices apart by what is left.
                self._asked[name] = asked.model_copy(update={"retain": None})
                self._retain(name, asked.retain or 0)
        except ConfigError as error:
            self._asked[name] = EXACT
            if text := self._refuse(name, error):
                logger.warning(
                    "ssdkv: request %s gets exact attention; kv_transfer_params.ssdkv: %s",
                    name,
                    text,
                )
        try:
            if hints is not None:  # rare: a start has one module less
                from vllm_ssdkv.connector.scheduler.kv_hints import hinted_retention

                self._retain(name, hinted_retention(hints.actions))
        except ConfigError as error:
            self._asked.setdefault(name, RequestOptions())
            if text := self._refuse(name, error):
                logger.warning("ssdkv: request %s retains no blocks; %s", name, text)
        if name in self._asked:
            self._choices[name] = Choice.of(self._asked[name].applied(self._config))

    def _refuse(self, name: str, error: ConfigError) -> str:
        """Text for the log; empty if the last refusal had the same, as a router's do."""
        # It is a client's text: one line, and not a long one.
        text = str(error).encode("unicode_escape").decode()[:_MAX_CHARS]
        self._refused[name] = text
        self._retained.pop(name, None)
        self._counters.add("sparse_requests_refused", 1)
        told, self._told = self._told, text
        return text if text != told else ""

    def _retain(self, name: str, seconds: int) -> None:
        if seconds and not self._retains:
            raise ConfigError(
                "retain: an engine with nodes in mode reuse, or with a tier of your own, retains "
                "no blocks"
            )
        if seconds and not self._config.retain_share:
            raise ConfigError("retain: this engine retains no blocks, by its option retain_share")
        self._retained[name] = max(seconds, self._retained.get(name, 0))

    def of(self, request_id: str) -> RequestOptions | None:
        """Options that a request asks for; None: nothing."""
        return self._asked.get(request_id)

    def retained_s(self, request_id: str) -> int:
        """Seconds for which a request's blocks are to be retained; 0: they are ordinary."""
        return self._retained.get(request_id, 0)

    def choice(self, request_id: str) -> Choice | None:
        """Options by which a request chooses what it reads while it is decoded; None: it attends
        to everything."""
        return self._choices.get(request_id, self._own)

    def chooses(self, request_id: str, tokens: int) -> bool:
        """Check whether a request of so many tokens chooses what it reads while it is decoded."""
        choice = self.choice(request_id)
        return choice is not None and tokens >= choice.exact_below

    def ended(self, request_id: str) -> dict[str, Any] | None:
        """Forget the request; ``kv_transfer_params`` of its answer, if it asked for something."""
        asked = self._asked.pop(request_id, None)
        seconds = self._retained.pop(request_id, 0)
        self._choices.pop(request_id, None)
        refused = self._refused.pop(request_id, None)
        if asked is None:
            return None
        served: dict[str, Any] = {"selector": asked.applied(self._config).selector}
        served |= asked.model_dump(exclude_none=True)
        if seconds:
            served["retain"] = f"{seconds}s"
        return {NAME: served if refused is None else {**served, "error": refused}}
