"""Report of ``ssdkv fsck``: problems, counted by kind and listed up to a bound."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

MAX_LISTED = 1000
"""Problems that are listed one by one, besides the first one of each kind; all are counted."""

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


REPAIR = "ssdkv fsck --repair"
FROM_HEADERS = (
    f"{REPAIR} --from-headers writes it anew with them, and keeps the old one as journal.rejected"
)
CURES: dict[ProblemKind, str] = {
    "device": "mount it, or name the directories where the devices are now; if it is dead, start "
    "the engine once without it",
    "manifest": f"{REPAIR} writes it and its copies anew from the newest one",
    "superblock": f"{REPAIR} writes it anew",
    "data_file": f"{REPAIR} brings the manifest or the size up to date; what lay there alone is "
    "dropped",
    "orphan": f"{REPAIR} removes it",
    "journal": f"{REPAIR} writes it anew from what is right, headers of slots included",
    "header": f"{REPAIR} drops the blocks",
    "page": f"{REPAIR} drops the blocks",
    "unreadable": f"{REPAIR} drops the blocks; watch the health of the drive",
    "copy": f"{REPAIR} writes it anew from the other copy",
}
"""Cure of each kind of finding, unless the finding says otherwise."""


@dataclass(slots=True)
class Problem:
    """One finding.

    Attributes:
        subject: The file, or the slot and rank.
        repaired: Whether it is gone now.
        cure: How to make it go.
    """

    kind: ProblemKind
    subject: str
    text: str
    repaired: bool = False
    cure: str = ""

    def __post_init__(self) -> None:
        self.cure = self.cure or CURES[self.kind]


@dataclass(slots=True)
class Kind:
    """Findings that are alike: of one kind, with one cure, all repaired or none.

    Attributes:
        count: How many there are.
        example: One of them.
    """

    count: int
    example: Problem


@dataclass(slots=True)
class Report:
    """Findings of a check.

    Attributes:
        slots: Blocks that the store has room for, and may grow to.
        slots_to_come: Those of ``slots`` that it has yet to grow by.
        stored: Slots that hold a block: by the journal, and those ``found``.
        found: Blocks that the journal does not name, found whole by the headers of their slots:
            looked for where it is lost or damaged, or on request.
        lost: Slots with such a header whose block is not whole: it was being overwritten, or is
            damaged.
        bad: Stored blocks that cannot be served; a repair drops them.
        out_of_reach: Those that have a part on absent devices only: they are neither right nor
            wrong, and stay; an engine finds them again when the device is back.
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
    slots_to_come: int = 0
    stored: int = 0
    found: int = 0
    lost: int = 0
    bad: int = 0
    out_of_reach: int = 0
    checked_slots: int = 0
    checked_bytes: int = 0
    unrepaired: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add(self, kind: ProblemKind, subject: object, text: str, cure: str = "") -> Problem:
        """Take in a problem; without a ``cure`` it is that of its kind."""
        problem = Problem(kind, str(subject), text, cure=cure)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.unrepaired += 1
        if len(self.problems) < MAX_LISTED or self.counts[kind] == 1:
            self.problems.append(problem)
        return problem

    def repaired(self, problem: Problem) -> None:
        """This one is gone."""
        if not problem.repaired:
            problem.repaired = True
            self.unrepaired -= 1

    def repaired_all(self, *kinds: ProblemKind) -> None:
        """Mark all problems of these kinds as gone, also those that are not listed."""
        for problem in self.problems:
            problem.repaired |= problem.kind in kinds
        self.unrepaired -= sum(self.counts.get(kind, 0) for kind in kinds)

    def kinds(self) -> list[Kind]:
        """Findings by kind, in the order in which they were found."""
        found: dict[tuple[str, str, bool], Kind] = {}
        for problem in self.problems:
            alike = (problem.kind, problem.cure, problem.repaired)
            kind = found.setdefault(alike, Kind(0, problem))
            kind.count += 1
        for name, total in self.counts.items():
            listed = [kind for kind in found.values() if kind.example.kind == name]
            listed[-1].count += total - sum(kind.count for kind in listed)
        return list(found.values())

    @property
    def clean(self) -> bool:
        """Check whether nothing was wrong."""
        return not self.counts
