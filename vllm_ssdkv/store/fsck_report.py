"""What ``ssdkv fsck`` found: problems, counted by kind and listed up to a bound."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

MAX_LISTED = 1000
"""Problems that are listed one by one; all are counted."""

ProblemKind: TypeAlias = Literal[
    "device",
    "manifest",
    "superblock",
    "data_file",
    "orphan",
    "journal",
    "header",
    "page",
    "unreadable",
    "copy",
]


@dataclass(slots=True)
class Problem:
    """One finding.

    Attributes:
        subject: The file, or the slot and rank.
        repaired: Whether it is gone now.
    """

    kind: ProblemKind
    subject: str
    text: str
    repaired: bool = False


@dataclass(slots=True)
class Report:
    """What a check found.

    Attributes:
        slots: Slots of the store.
        stored: Slots that hold a block, by the journal.
        bad: Those of them that cannot be served; a repair drops them.
        out_of_reach: Those that have a part on absent devices only: they are neither right nor
            wrong, and stay.
        checked_slots: Slots read and verified, those of each rank counted.
        checked_bytes: Their bytes, those of both copies.
        counts: Number of problems of each kind.
        unrepaired: Problems that are still there.
        problems: The first :data:`MAX_LISTED` of them.
    """

    store: str
    state_dir: str
    devices: list[str]
    ranks: int
    slots: int
    stored: int = 0
    bad: int = 0
    out_of_reach: int = 0
    checked_slots: int = 0
    checked_bytes: int = 0
    unrepaired: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add(self, kind: ProblemKind, subject: object, text: str) -> Problem:
        """Take in a problem."""
        problem = Problem(kind, str(subject), text)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.unrepaired += 1
        if len(self.problems) < MAX_LISTED:
            self.problems.append(problem)
        return problem

    def repaired(self, problem: Problem) -> None:
        """This one is gone."""
        if not problem.repaired:
            problem.repaired = True
            self.unrepaired -= 1

    def repaired_all(self, *kinds: ProblemKind) -> None:
        """Those of these kinds are gone, also those that are not listed."""
        for problem in self.problems:
            problem.repaired |= problem.kind in kinds
        self.unrepaired -= sum(self.counts.get(kind, 0) for kind in kinds)

    @property
    def clean(self) -> bool:
        """Whether nothing was wrong."""
        return not self.counts
