"""vLLM's ``kv_hints``: what an orchestrator has done with the blocks of a request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.sizes import MAX_DURATION_S

if TYPE_CHECKING:
    from vllm.v1.kv_hints import KvHintAction

_RETAIN: Final = "kv.retain"
"""Type of the action that retains a request's blocks, as vLLM's developers propose it."""
_MOST: Final = 64
"""Actions of a request, and directives of an action, that are looked at."""


def hinted_retention(actions: Sequence[KvHintAction]) -> int:
    """Seconds for which vLLM's KV hints have a request's blocks retained; 0: they do not.

    A ``kv.retain`` action has ``directives`` for ranges of tokens. Here the longest of their
    durations counts for the whole request; one without a duration lasts as long as may be, and one
    of priority 0 asks for nothing.

    Raises:
        ConfigError: an action has none, or another value for a duration.
    """
    longest = 0
    for action in actions[:_MOST]:
        if action.action_type != _RETAIN:
            continue
        directives = action.payload.get("directives")
        for directive in directives[:_MOST] if isinstance(directives, list) else [None]:
            if not isinstance(directive, dict):
                raise ConfigError(f"kv_hints: the action {_RETAIN} needs a list of directives")
            if directive.get("priority") == 0:
                continue
            seconds = directive.get("duration")
            if seconds is None:
                seconds = MAX_DURATION_S
            number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            if not number or not 0 < seconds <= MAX_DURATION_S:
                raise ConfigError(
                    f"kv_hints: a duration of {_RETAIN} is a number of seconds, above 0 and "
                    f"at most {MAX_DURATION_S}"
                )
            longest = max(longest, math.ceil(seconds))
    return longest
