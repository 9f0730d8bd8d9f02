"""vLLM's ``kv_hints``: what an orchestrator has done with the blocks of a request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.sizes import MAX_DURATION_S

if TYPE_CHECKING:
    from vllm.v1.kv_hints import KvHintAction

RETAIN: Final = "kv.retain"
"""Type of the action that retains a request's blocks, as vLLM's developers propose it."""
_MOST: Final = 64
"""Actions of a request, and directives of an action, at most."""


def hinted_retention(actions: Sequence[KvHintAction]) -> int:
    """Seconds for which vLLM's KV hints have a request's blocks retained; 0: they do not.

    A ``kv.retain`` action has ``directives`` for ranges of tokens. Here the longest of their
    durations counts for the whole request; one without a duration lasts as long as may be, and one
    of priority 0 or less asks for nothing.

    Raises:
        ConfigError: an action has none, or another value for a duration or a priority; or there are
            too many of either to be looked at.
    """
    longest = 0
    if len(actions) > _MOST:
        raise ConfigError(f"kv_hints: {len(actions)} actions, more than {_MOST}: send fewer")
    for action in actions:
        if action.action_type != RETAIN:
            continue
        directives = action.payload.get("directives")
        if not isinstance(directives, list) or not all(isinstance(one, dict) for one in directives):
            raise ConfigError(f"kv_hints: the action {RETAIN} needs a list of directives")
        if len(directives) > _MOST:
            count = len(directives)
            raise ConfigError(
                f"kv_hints: {count} directives of {RETAIN}, more than {_MOST}: send fewer"
            )
        for directive in directives:
            priority, seconds = directive.get("priority"), directive.get("duration")
            if priority is None:
                priority = 1
            if not _is_number(priority):
                raise ConfigError(f"kv_hints: a priority of {RETAIN} is a number")
            if priority <= 0:
                continue
            if seconds is None:
                seconds = MAX_DURATION_S
            if not _is_number(seconds) or not 0 < seconds <= MAX_DURATION_S:
                raise ConfigError(
                    f"kv_hints: a duration of {RETAIN} is a number of seconds, above 0 and "
                    f"at most {MAX_DURATION_S}"
                )
            longest = max(longest, math.ceil(seconds))
    return longest


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
