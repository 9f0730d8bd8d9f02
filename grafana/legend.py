"""Names of series as short as they can be and still tell one from the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Final

_SERVER: Final = ("instance", "engine")


class ShortLabels:
    """What of the labels ``device``, ``instance`` and ``engine`` tells a dashboard's series apart.

    A dashboard of one engine does not name it; of paths, parts that all of them have are left out.

    Example:
        ``/mnt/nvme0/kv/qwen`` and ``/mnt/nvme1/kv/qwen`` are ``nvme0`` and ``nvme1``.
    """

    def __init__(self, series: Iterable[Mapping[str, str]]):
        """``series``: the labels of all of them."""
        every = list(series)
        servers = {tuple(labels.get(name, "") for name in _SERVER) for labels in every}
        self._one_server = len({server for server in servers if any(server)}) <= 1
        paths = sorted({labels["device"] for labels in every if labels.get("device")})
        self._devices = dict(zip(paths, distinct_parts(paths), strict=True))

    def of(self, labels: Mapping[str, str]) -> dict[str, str]:
        """The same labels, with short values."""
        short = dict(labels)
        if "device" in short:
            short["device"] = self._devices.get(short["device"], short["device"])
        if self._one_server:
            short |= dict.fromkeys(_SERVER, "")
        return short


def distinct_parts(paths: Sequence[str]) -> list[str]:
    """Parts of each path from the first to the last in which they differ; of one path alone
    its last part."""
    parts = [PurePath(path).parts for path in paths]
    if len(parts) <= 1:
        return [path[-1] if path else "" for path in parts]
    least = min(map(len, parts))
    begin = 0
    while begin < least and len({path[begin] for path in parts}) == 1:
        begin += 1
    end = 0
    while end < least - begin and len({path[len(path) - 1 - end] for path in parts}) == 1:
        end += 1
    short = ["/".join(path[begin : len(path) - end]) for path in parts]
    # One path may be the beginning of another.
    return short if all(short) else ["/".join(path[max(0, begin - 1) :]) for path in parts]
