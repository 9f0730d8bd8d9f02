"""Rules of faults to inject: from the options, or from a file that may change while we run."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.config.io_engine import FaultRule

logger = logging.getLogger(__name__)


class RuleState:
    """A rule and what it has done so far. Not thread-safe."""

    def __init__(self, rule: FaultRule) -> None:
        self.rule = rule
        self.random = np.random.default_rng(rule.seed)
        self._seen = 0
        self._fired = 0

    def fire(self, matching: int) -> NDArray[np.bool_]:
        """Mask of the next ``matching`` requests that are hit, shape [matching]."""
        hit = self._seen + np.arange(matching) >= self.rule.after
        self._seen += matching
        if self.rule.probability < 1:
            hit &= self.random.random(matching) < self.rule.probability
        if self.rule.count is not None:
            hit &= np.cumsum(hit) <= self.rule.count - self._fired
        self._fired += int(hit.sum())
        return hit


def carry_over(
    rules: Sequence[FaultRule], states: Sequence[RuleState], devices: int
) -> list[RuleState]:
    """States of ``rules``: an unchanged rule keeps its own, a new one starts fresh.

    Raises:
        ConfigError: a rule names a device that does not exist.
    """
    kept = list(states)
    result = []
    for rule in rules:
        if rule.device is not None and rule.device >= devices:
            raise ConfigError(f"fault rule: device {rule.device} of {devices} does not exist")
        state = next((old for old in kept if old.rule == rule), None)
        if state is None:
            state = RuleState(rule)
        else:
            kept.remove(state)
        result.append(state)
    return result


def parse_rules(text: bytes) -> tuple[FaultRule, ...]:
    """Rules from a JSON list of objects with the fields of :class:`FaultRule`.

    Raises:
        ConfigError: it is not that.
    """
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}") from error
    if not isinstance(items, list):
        raise ConfigError("not a list of fault rules")
    known = [field.name for field in fields(FaultRule)]
    rules = []
    for index, item in enumerate(items):
        if not isinstance(item, dict) or "kind" not in item:
            raise ConfigError(f"fault rule {index} is not an object with a kind: {item!r}")
        for key in item:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(f"fault rule {index}: unknown field {key!r}{hint}")
        rules.append(FaultRule(**item))
    return tuple(rules)


class FaultFile:
    """A control file, re-read when it changes. A missing file holds no rules. Not thread-safe."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._signature: tuple[int, int, int] | None = None

    def changed(self) -> bool:
        """Check whether the file differs, by time, size or inode, from what ``read`` last saw."""
        return self._stat() != self._signature

    def read(self) -> tuple[FaultRule, ...]:
        """The rules in the file now.

        Raises:
            ConfigError: it cannot be read, or does not hold rules; the text names the file.
        """
        # Before the content: a write in between shows as one more change.
        self._signature = self._stat()
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            if self.path.parent.is_dir():
                return ()
            raise ConfigError(f"fault file {self.path}: its directory does not exist") from None
        except OSError as error:
            raise ConfigError(f"fault file {self.path}: {error.strerror}") from error
        try:
            return parse_rules(text)
        except ConfigError as error:
            raise ConfigError(f"fault file {self.path}: {error}") from error

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            status = self.path.stat()
        except OSError:
            return None  # read() says why
        return status.st_mtime_ns, status.st_size, status.st_ino
