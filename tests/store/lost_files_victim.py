"""A process with some small stores open, which is killed; run by ``test_lost_files.py``.

Standard input has a line of JSON: the directories of each store, the first one with its state. Each
store is filled to a half; after another line, which comes when its files were changed, the rest is
stored.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import types
from pathlib import Path
from typing import Any

SLOTS = tuple(range(12))


def say(word: str) -> None:
    os.write(1, f"{word}\n".encode())


class Half:
    """One of the stores."""

    def __init__(self, filled: Any, place: Any, index: Any):  # noqa: ANN401 - imported late
        self.rank = filled._Rank(place, 0)
        self.index, _ = index.open_index(place)
        self.index.allocate(len(SLOTS))

    def store(self, slots: tuple[int, ...], key_of: Any, array: Any) -> None:  # noqa: ANN401 - likewise
        keys = [key_of(slot) for slot in slots]
        self.rank.write(array(slots), self.index.epochs(array(slots)), keys)
        for slot, key in zip(slots, keys, strict=True):
            assert self.index.publish(slot, key)
            self.index.durable(slot)


def main() -> None:
    tests = types.ModuleType("tests")
    tests.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["tests"] = tests
    from tests.store import filled_store as filled
    from tests.store.conftest import array, key_of
    from vllm_ssdkv.store import open as opening

    stores = []
    for paths in json.loads(sys.stdin.readline()):
        devices = tuple(map(Path, paths))
        place = filled.FilledStore(devices, devices[0], SLOTS, ranks=1).place
        stores.append(Half(filled, place, opening))
        stores[-1].store(SLOTS[::2], key_of, array)
    say("half")
    sys.stdin.readline()
    for store in stores:
        store.store(SLOTS[1::2], key_of, array)
    say("all")
    signal.pause()


if __name__ == "__main__":
    main()
