"""Share of the bytes that a device attends to, so that it and the step's thread end together.

Three ways are compared by what they took per byte: the step alone, the device alone, and both at
once, with a share that moves toward the one that ended first. Ways that are not the best are tried
again, seldom enough that this costs half a percent of the time, however slow they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol


class Way(Enum):
    """Side that attends."""

    STEP = "step"
    DEVICE = "device"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class Attended:
    """Measured attention of one step: sums over its layers.

    Attributes:
        nbytes: K and V; what rows share counts for each.
        theirs: Of these, the device's.
        seconds: From handing in to the end of the later one.
        step_s: To the end of the step's own part.
        device_s: To the end of the device's part, or what it took where it ended before the step.
    """

    nbytes: float
    theirs: float
    seconds: float
    step_s: float
    device_s: float


class ShareRule(Protocol):
    """Decides for the next step, after each. Used by one thread."""

    @property
    def share(self) -> float:
        """Share of the device, from 0 to 1."""
        ...

    @property
    def way(self) -> Way | None:
        """The best way known. None while that is being found out."""
        ...

    @property
    def trying(self) -> bool:
        """Check whether the next step goes another way, to see what it takes."""
        ...

    @property
    def rates(self) -> Mapping[Way, float]:
        """Bytes per second of each way, as far as they are known."""
        ...

    def learn(self, attended: Attended) -> None:
        """A step has ended, which went by the share."""
        ...


@dataclass(frozen=True, slots=True)
class FixedShare:
    """The share that somebody chose. See ``ShareRule``."""

    share: float

    @property
    def way(self) -> Way:
        """See ``ShareRule``."""
        return Way.BOTH if 0 < self.share < 1 else Way.DEVICE if self.share else Way.STEP

    @property
    def trying(self) -> bool:
        """See ``ShareRule``."""
        return False

    @property
    def rates(self) -> Mapping[Way, float]:
        """See ``ShareRule``."""
        return {}

    def learn(self, attended: Attended) -> None:
        """See ``ShareRule``."""


FIRST_STEPS: Final = {Way.STEP: 3, Way.DEVICE: 3, Way.BOTH: 7}
"""Steps of the first trial of a way. The quickest counts: kernels are compiled in the first one."""

TRIAL_STEPS: Final = {Way.STEP: 2, Way.DEVICE: 2, Way.BOTH: 6}
"""Steps of a later trial; a share needs some to settle."""

TRIAL_COST: Final = 1 / 200
"""Part of the time that trials of a way may cost."""

TRIAL_EVERY: Final = (64, 65536)
"""Steps between the trials of a way, at least and at most."""

BOTH_EVERY: Final = 1024
"""Steps between the trials of both at once, at most, where they should be faster, by what they take
alone."""

BETTER: Final = 0.98
"""Time of a way, as a part of that of the way in use, below which it is taken."""

CHANGED: Final = 1.3
"""Factor of the time per byte of the way in use that says that conditions are others."""

SMOOTH: Final = 0.2
"""Weight of the latest step in what a way takes; a quarter of that where it took longer, since what
else a machine does makes single steps slow."""

GAIN: Final = 0.25
"""Part of the imbalance of a step that the share makes good; twice as much in a trial."""

MOST_CHANGE: Final = 0.02
"""Change of the share in a step, at most; five times as much in a trial, which begins at what the
ways alone suggest."""

LEAST: Final = 1 / 64
"""Share of either, at least, while both attend."""


@dataclass(slots=True)
class _Figure:
    """Time that a way takes.

    Attributes:
        per_byte: Seconds; infinity: not known.
        left: Steps of the trial under way that are still to come.
        due: Steps until the next trial.
        every: Steps from one trial to the next.
    """

    per_byte: float = math.inf
    left: int = 0
    due: int = 0
    every: int = 0

    def begin(self, steps: int) -> None:
        """Begin a trial."""
        self.left = steps
        self.per_byte = math.inf

    def learn(self, per_byte: float) -> None:
        """A step went this way. One that was interrupted counts as twice the usual, at most."""
        if self.left:
            self.left -= 1
            self.per_byte = min(self.per_byte, per_byte)
        else:
            seen = min(per_byte, 2 * self.per_byte)
            weight = SMOOTH if seen < self.per_byte else SMOOTH / 4
            self.per_byte += weight * (seen - self.per_byte)


@dataclass(slots=True)
class MeasuredShare:
    """See ``ShareRule``; by what steps took.

    Example:
        rule = MeasuredShare()
        while decoding:
            rule.learn(attend(rule.share))

    Attributes:
        splits: Whether both may attend to a step at once; else all goes one way or the other.
    """

    splits: bool = True
    _figures: dict[Way, _Figure] = field(init=False)
    _used: Way = field(init=False, default=Way.STEP)
    _now: Way = field(init=False, default=Way.STEP)
    _split: float = field(init=False, default=0.5)
    _unsettled: int = field(init=False, default=0)
    """Steps for which the share moves twice as fast."""
    _usual: float = field(init=False, default=math.inf)
    """Seconds per byte of the way in use, when conditions were last looked at."""

    def __post_init__(self) -> None:
        """Begin with the step alone."""
        ways = [way for way in Way if self.splits or way is not Way.BOTH]
        self._figures = {way: _Figure() for way in ways}
        self._begin(Way.STEP, FIRST_STEPS[Way.STEP])

    @property
    def share(self) -> float:
        """See ``ShareRule``."""
        return {Way.STEP: 0.0, Way.DEVICE: 1.0, Way.BOTH: self._split}[self._now]

    @property
    def way(self) -> Way | None:
        """See ``ShareRule``."""
        return None if math.isinf(self._usual) else self._used

    @property
    def trying(self) -> bool:
        """See ``ShareRule``."""
        return self._figures[self._now].left > 0

    @property
    def rates(self) -> Mapping[Way, float]:
        """See ``ShareRule``."""
        return {
            way: 1 / figure.per_byte
            for way, figure in self._figures.items()
            if 0 < figure.per_byte < math.inf
        }

    def learn(self, attended: Attended) -> None:
        """See ``ShareRule``."""
        if attended.nbytes <= 0 or attended.seconds <= 0:
            return
        figure = self._figures[self._now]
        trial = figure.left > 0
        figure.learn(attended.seconds / attended.nbytes)
        if self._now is Way.BOTH and 0 < attended.theirs < attended.nbytes:
            self._balance(attended)
        if figure.left:
            return
        unknown = [way for way, other in self._figures.items() if math.isinf(other.per_byte)]
        if unknown:
            self._begin(unknown[0], FIRST_STEPS[unknown[0]])
            return
        self._choose()
        if trial:
            self._plan(self._now)
        self._now = self._used
        self._look_again()

    def _balance(self, attended: Attended) -> None:
        """Move the share toward the one that ended first."""
        own = attended.nbytes - attended.theirs
        step, device = attended.step_s / own, attended.device_s / attended.theirs
        self._note_faster(Way.STEP, step)
        self._note_faster(Way.DEVICE, device)
        # Of more bytes the mean is nearer to what one more takes.
        step = min(step, self._figures[Way.STEP].per_byte)
        device = min(device, self._figures[Way.DEVICE].per_byte)
        if step + device <= 0:
            return
        change = (attended.step_s - attended.device_s) / (attended.nbytes * (step + device))
        most = MOST_CHANGE
        if self._unsettled:
            self._unsettled -= 1
            change, most = 2 * change, 5 * most
        change = min(max(GAIN * change, -most), most)
        self._split = min(max(self._split + change, LEAST), 1 - LEAST)

    def _note_faster(self, way: Way, per_byte: float) -> None:
        """One of both is faster than it was alone: see soon whether it still is so slow."""
        figure = self._figures[way]
        if per_byte < figure.per_byte / CHANGED < math.inf:
            figure.due = min(figure.due, self._steps_until_trial(way, per_byte))

    def _begin(self, way: Way, steps: int) -> None:
        """Begin a trial of a way."""
        self._now = way
        if way is Way.BOTH:
            step, device = (self._figures[one].per_byte for one in (Way.STEP, Way.DEVICE))
            self._split = min(max(step / (step + device), LEAST), 1 - LEAST)
            self._unsettled = steps
        self._figures[way].begin(steps)

    def _choose(self) -> None:
        """Use the best way; the one in use stays for a small difference."""
        taken = {way: figure.per_byte for way, figure in self._figures.items()}
        best = min(taken, key=taken.__getitem__)
        first = math.isinf(self._usual)
        if first or taken[best] < BETTER * taken[self._used]:
            before, self._used = self._used, best
            self._usual = taken[best]
            if first:
                for way in taken:
                    self._plan(way)
            elif before is not best:
                self._plan(before)

    def _plan(self, way: Way) -> None:
        """Plan the next trial of a way."""
        figure = self._figures[way]
        figure.every = figure.due = self._steps_until_trial(way, figure.per_byte)

    def _steps_until_trial(self, way: Way, per_byte: float) -> int:
        """The slower a way is, the later it is tried again."""
        used = self._figures[self._used].per_byte
        steps = math.ceil(TRIAL_STEPS[way] * max(per_byte / used - 1, 0.0) / TRIAL_COST)
        least, most = TRIAL_EVERY
        if way is Way.BOTH:
            step, device = (self._figures[one].per_byte for one in (Way.STEP, Way.DEVICE))
            if step * device < BETTER * used * (step + device):
                most = BOTH_EVERY
        return min(max(steps, least), most)

    def _look_again(self) -> None:
        """Begin a trial that is due; all are due earlier where conditions have changed."""
        now = self._figures[self._used].per_byte
        changed = not self._usual / CHANGED < now < self._usual * CHANGED
        if changed:
            self._usual = now
        others = [way for way in self._figures if way is not self._used]
        for way in others:
            figure = self._figures[way]
            figure.due -= 1
            if changed:
                figure.due = min(figure.due, max(TRIAL_EVERY[0], figure.every) // 8)
        due = [way for way in others if self._figures[way].due <= 0]
        if due:
            self._begin(due[0], TRIAL_STEPS[due[0]])
