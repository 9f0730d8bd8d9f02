"""A cost as a sum of what it is made of, learnt from what was measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

_ROUNDS = (1.5,) * 6 + (0.5,) * 4 + (0.1,) * 8
"""Per round, errors below which all weigh the same, as logarithms. The first rounds find the mean,
from where the others find what the larger part says; from its old place they would hardly leave.
The last value is what measurements scatter by anyway.
"""
_LARGEST_FALL, _LARGEST_RISE = -0.9, 3.0
"""Most that a round may change a prediction by, relative to it."""
_OLD = 0.02
"""Weight of the oldest measurements: they may be the only ones of their kind."""
_SURPRISE = 3.0
"""A measurement off by this factor is a surprise."""
_RIDGE = 1e-8
_LEAST_SECONDS = 1e-7


class LinearFit:
    """``seconds = weights . features`` with weights >= 0. Not thread-safe; bounded memory.

    Errors are compared as logarithms, so that ten times too slow counts as much as ten times too
    fast and a small cost as much as a large one, and by their absolute value: what counts is what
    the larger part of the recent measurements says, not their mean, which one outlier would spoil.

    Measurements are kept by class, the newest few of each: a thousand steps of one kind must not
    make it forget the only one of another kind.
    """

    def __init__(
        self, doubts: Sequence[float], *, keep: int, half_life: float, believe_after: int = 0
    ):
        """Args:
        doubts: One positive number per feature. Where measurements do not tell which feature a
            cost belongs to, it goes to those with the smallest doubt.
        keep: Measurements kept per class.
        half_life: After so many newer measurements, one counts half.
        believe_after: So many in a row, all far above what was expected or all far below, mean
            that things have changed: what was measured before is forgotten. 0: never.
        """
        self._doubts = np.array(doubts, dtype=np.float64)
        self._keep = keep
        self._half_life = half_life
        self._believe_after = believe_after
        self._surprises = 0
        self._classes: dict[Hashable, deque[tuple[int, tuple[float, ...], float]]] = {}
        self._count = 0
        self._weights: F64 = np.zeros(len(doubts))
        self._new = 0
        """Measurements since the weights were solved for."""

    @property
    def count(self) -> int:
        """Measurements taken in so far."""
        return self._count

    def observe(self, features: Sequence[float], seconds: float, kind: Hashable = None) -> None:
        """Take in one measurement of class ``kind``; a caller uses a bounded number of classes."""
        self._count += 1
        entry = (self._count, tuple(features), max(seconds, _LEAST_SECONDS))
        if self._believe_after and self._count > 1:
            self._look_for_change(entry[1], entry[2])
        self._classes.setdefault(kind, deque(maxlen=self._keep)).append(entry)
        self._new += 1

    def _look_for_change(self, features: tuple[float, ...], seconds: float) -> None:
        expected = max(self.predict(features), _LEAST_SECONDS)
        if 1 / _SURPRISE < seconds / expected < _SURPRISE:
            self._surprises = 0
            return
        sign = 1 if seconds > expected else -1
        self._surprises = sign if self._surprises * sign <= 0 else self._surprises + sign
        if abs(self._surprises) < self._believe_after:
            return
        oldest = self._count - self._believe_after
        for kind, kept in self._classes.items():
            newer = [entry for entry in kept if entry[0] > oldest]
            self._classes[kind] = deque(newer, maxlen=self._keep)
        self._surprises = 0

    def weights(self) -> F64:
        """Seconds per unit of each feature, [features].

        Solves, in about a millisecond, when enough is new: with changes to look for any
        measurement is, else an eighth of what was known, and never more than 16.
        """
        enough = 1 if self._believe_after else min(16, max(1, self._count // 8))
        if self._new >= enough:
            self._new = 0
            self._solve()
        return self._weights

    def predict(self, features: Sequence[float]) -> float:
        """Seconds for these features; 0 before the first measurement."""
        return float(self.weights() @ np.array(features, dtype=np.float64))

    def _solve(self) -> None:
        entries = [entry for kept in self._classes.values() for entry in kept]
        age = self._count - np.array([entry[0] for entry in entries])
        features = np.array([entry[1] for entry in entries], dtype=np.float64)
        seconds = np.array([entry[2] for entry in entries], dtype=np.float64)
        recent = np.maximum(0.5 ** (age / self._half_life), _OLD)
        recent /= recent.sum()
        scale = np.maximum(features.max(axis=0), 1e-12)
        unit = float(np.exp(recent @ np.log(seconds)))
        x, y = features / scale, seconds / unit
        weights = _nonnegative(x / y[:, None], np.ones(len(y)), recent, self._doubts)
        for even in _ROUNDS:
            # One step of Gauss and Newton on log(y / prediction), each error weighted by its
            # inverse: the sum of squares becomes a sum of absolute values.
            guess = np.maximum(x @ weights, 1e-9)
            error = np.clip(np.log(y / guess), _LARGEST_FALL, _LARGEST_RISE)
            trust = recent / np.maximum(np.abs(error), even)
            weights = _nonnegative(
                x / guess[:, None], 1.0 + error, trust / trust.sum(), self._doubts
            )
        self._weights = weights * unit / scale


def _nonnegative(x: F64, y: F64, trust: F64, doubts: F64) -> F64:
    """Weights >= 0 that minimise the squared error: those that come out negative are left out."""
    active = np.ones(x.shape[1], dtype=np.bool_)
    weights = np.zeros(x.shape[1])
    while active.any():
        part = x[:, active]
        square = (part.T * trust) @ part
        ridge = np.diag(_RIDGE * doubts[active]) * square.trace()
        solved = np.linalg.solve(square + ridge, (part.T * trust) @ y)
        if (solved >= 0).all():
            weights[active] = solved
            break
        active[np.flatnonzero(active)[solved < 0]] = False
    return weights
