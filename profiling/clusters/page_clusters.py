"""Swarm's clusters of a trace's pages, and their ablations, on the engine's own code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from vllm_ssdkv.clustering.clusters import Clusters, cluster
from vllm_ssdkv.clustering.co_activation import ActivationWindow, Form
from vllm_ssdkv.clustering.routing import in_order, members_of
from vllm_ssdkv.profiling.clusters import scheduling
from vllm_ssdkv.profiling.clusters.drives import Load, by_slot_and_head, singly
from vllm_ssdkv.profiling.clusters.trace import F32, I64, Bools

THRESHOLD: Final = 0.5
"""tau: distance below which a page joins."""
LARGEST: Final = 8
"""Pages of a cluster."""
_PARTNERS: Final = 64

Schedule = Literal["full", "no balance", "no dedup", "static"]
SCHEDULES: Final[tuple[Schedule, ...]] = ("full", "no balance", "no dedup", "static")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to make clusters."""

    name: str
    copies: bool = True
    expand: Literal["mean", "medoid"] = "mean"
    form: Form = "conditional"


NO_REPLICA: Final = Variant("Swarm, no replica", copies=False)
VARIANTS: Final = (
    Variant("Swarm"),
    NO_REPLICA,
    Variant("Swarm, medoid only", expand="medoid"),
    Variant("Swarm, Jaccard", form="jaccard"),
    Variant("Swarm, P as printed", form="printed"),
)


def window_of(chosen: Bools) -> ActivationWindow:
    """Counts of the pages that these queries chose, [queries, pages]."""
    window = ActivationWindow(chosen.shape[1], max(1, len(chosen)))
    for row in chosen:
        window.record(np.flatnonzero(row))
    return window


def clusters_of(chosen: Bools, variant: Variant) -> Clusters:
    """Clusters of the pages that these queries chose."""
    affinity = window_of(chosen).affinity(variant.form, THRESHOLD, _PARTNERS)
    return cluster(affinity, THRESHOLD, LARGEST, copies=variant.copies, expand=variant.expand)


def activated(scores: F32, clusters: Clusters, budget: int) -> I64:
    """The best clusters, until they hold ``budget`` different pages, whole ones."""
    order = np.argsort(-scores, kind="stable")
    members = in_order(scores, clusters)
    new = np.zeros(len(members), np.int64)
    new[np.unique(members, return_index=True)[1]] = 1
    ends = np.cumsum(clusters.size[order])
    before = np.concatenate([[0], np.cumsum(new)])
    held, earlier = before[ends], before[ends - clusters.size[order]]
    useful = np.flatnonzero((held > earlier) & (earlier < budget))
    picked: I64 = order[useful]
    return picked


def scheduled(
    which: list[list[I64]], clusters: list[Clusters], drives: int, schedule: Schedule
) -> Load:
    """Reads of activated clusters, ``which`` by step and head, in Swarm's round robin (7).

    ``full``: each page once, from the emptiest bucket. ``no balance``: from its first replica.
    ``no dedup``: every copy counts, from the emptiest bucket. ``static``: every copy, where it is.
    """
    drive, first = [], 0
    for one in clusters:
        drive.append(scheduling.round_robin(one, drives, first))
        first += len(one.member)
    replicas = [
        scheduling.replicas_of(one, where) for one, where in zip(clusters, drive, strict=True)
    ]
    steps = []
    for heads in which:
        entries: list[list[int]] = []
        fixed: list[int] = []
        for head, picked in enumerate(heads):
            places = members_of(clusters[head], picked)
            pages = clusters[head].member[places]
            if schedule in {"full", "no balance"}:
                pages = np.unique(pages)
            entries += [replicas[head][page] for page in pages.tolist()]
            fixed += drive[head][places].tolist()
        if schedule == "static":
            steps.append(np.array(fixed, np.int64))
        elif schedule == "no balance":
            steps.append(scheduling.static(entries))
        else:
            steps.append(scheduling.assign(entries, drives))
    return singly(steps, drives)


def stored(
    which: list[list[I64]], clusters: list[Clusters], drives: int, slot_pages: int, copies: int
) -> Load:
    """Reads of the same pages where the engine's slots have them, each once.

    Of ``copies`` the first lies on the drive of its slot and head, the second on the next drive
    (``replicas: 2``). A slot has ``slot_pages`` pages of a head.
    """
    steps = []
    for heads in which:
        entries: list[list[int]] = []
        for head, picked in enumerate(heads):
            page = np.unique(clusters[head].member[members_of(clusters[head], picked)])
            slot = page.astype(np.int64) // slot_pages
            own = by_slot_and_head(np.full_like(slot, head), slot, drives)
            held = (own[:, None] + np.arange(min(copies, drives))) % drives
            entries += held.tolist()
        steps.append(scheduling.assign(entries, drives))
    return singly(steps, drives)
