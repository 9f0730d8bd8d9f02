"""Reasons for which a request waits before vLLM may run it: one list for code, metric and docs."""

from __future__ import annotations

from enum import Enum


class WaitReason(Enum):
    """One reason. ``docs/messages.md`` has them as a table, made from here.

    Attributes:
        label: Value of the label ``reason`` of ``vllm:ssdkv_waits_total``.
        mode: The mode in which it is given; "both".
        meaning: The shortage, for users.
        end: The event that ends the wait.
        remedy: Setting that makes it rarer.
    """

    ADAPTER = (
        "adapter",
        "both",
        "The workers may hold its LoRA adapter, but have not reported its weights.",
        "They report, or three steps have passed.",
        "none",
    )
    DIGEST = (
        "digest",
        "both",
        "The cache was reset, and the workers are about to digest their current weights.",
        "They have, or three steps have passed.",
        "none",
    )
    HBM = (
        "hbm",
        "reuse",
        "HBM has no room for its hit beside hits that are loaded and still to run (models with "
        "sliding windows or states).",
        "Requests that run give blocks back.",
        "more KV memory, lower `--max-num-seqs`",
    )
    HBM_TURN = (
        "hbm_turn",
        "reuse",
        "A request before it in line waits for `hbm`: nobody takes the blocks that it waits for.",
        "That request has been admitted.",
        "as for `hbm`",
    )
    RETRY_TURN = (
        "retry_turn",
        "both",
        "The load of another request failed, and that one goes first.",
        "The other one runs, or has ended.",
        "the drives: see `load_failures`",
    )
    RETRY_HBM = (
        "retry_hbm",
        "both",
        "Its own load failed, and HBM has no room for all of it: requests that hold blocks pass.",
        "There is room, or no other request holds blocks.",
        "the drives: see `load_failures`",
    )
    ELSEWHERE = (
        "elsewhere",
        "reuse",
        "Another request, of any engine of the node, is computing blocks that it begins with.",
        "They are stored; or the other one stores nothing for 2 s, has ended, or takes longer "
        "than computing them here would.",
        "none",
    )
    NEW_SLOTS = (
        "new_slots",
        "page",
        "Slots for its context are on their way: the store grows, or segments are being striped "
        "anew.",
        "They can be had, or the store finds no more space; or nothing else has run for 60 s, and "
        "the engine stops.",
        "none",
    )
    SLOTS = (
        "slots",
        "page",
        "The store has too few slots for its whole context: other requests hold them, or they are "
        "being written.",
        "Other requests end, or writes do.",
        "raise capacities, lower `--max-num-seqs`",
    )
    WRITES_PAUSED = (
        "writes_paused",
        "page",
        "Writes to a device are paused: its file system has no room or is read-only, or they fail. "
        "The request's KV could not be kept.",
        "A write succeeds, which is tried after 1 s, then 2 s, up to 60 s; or nothing has run for "
        "60 s: the engine goes on without the device, or stops if there is no other.",
        "free space on the device, or replace it",
    )
    SEATS = (
        "seats",
        "both",
        "As many hits are loaded ahead as vLLM runs requests (`--scheduling-policy priority`).",
        "One of them runs.",
        "raise `--max-num-seqs`",
    )

    def __init__(self, label: str, mode: str, meaning: str, end: str, remedy: str):
        self.label, self.mode, self.meaning = label, mode, meaning
        self.end, self.remedy = end, remedy
