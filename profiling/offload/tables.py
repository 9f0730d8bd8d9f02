"""Tables of ``ssdkv lab bench offload``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.offload.xcache.x_rule import XRates, XShape
from vllm_ssdkv.profiling.offload.bench import DRAM, FLASH, FLEXGEN, Row
from vllm_ssdkv.profiling.offload.rig import WINDOW
from vllm_ssdkv.profiling.offload.x_cache import XStep
from vllm_ssdkv.profiling.table import Table

_AS_GOOD: Final = 0.9
"""Share of the best tokens/s that is as good."""
ROWS: Final = {
    "P3": "attention on a drive, dense, over FlexGen's path from one",
    "P3 our path": "the same over our own path from the same drive",
    "P4 dense": "the most drives over one",
    "P4 sparse": "the same, sparse",
    "P5": "sparse on a drive over FlexGen's path",
    "P5 our path": "the same over the same pages by our own path",
    "P6": "sparse over dense, one drive",
    "P18 near storage": "attention near storage over KV over the link",
    "P18 write-back": "a write every 16 tokens over one every token",
    "P19": "tokens between two writes that are best",
}
"""Rows of docs/papers.md that throttled devices have a value for."""


def tables(document: Row) -> list[Table]:
    """All tables of a document, as :func:`vllm_ssdkv.profiling.offload.bench.run` makes it."""
    rows: list[Row] = document["rows"]
    return [
        one
        for one in (
            speeds(rows),
            link(rows),
            scaling(rows),
            write_back(rows),
            writing(document["writes"]),
            x_cache(document),
            ablation(document),
            host(document),
            by_rows(document),
        )
        if one.rows
    ]


def find(rows: Sequence[Row], **wanted: Any) -> Row | None:  # noqa: ANN401
    """The first row that has these figures."""
    for row in rows:
        if all(row[name] == value for name, value in wanted.items()):
            return row
    return None


def ratio(fast: Row | None, slow: Row | None) -> float | None:
    """Tokens/s of one row over those of another; None where one was not measured."""
    if fast is None or slow is None:
        return None
    return float(fast["tokens_per_s"] / slow["tokens_per_s"])


def _sizes(row: Row) -> dict[str, Any]:
    """Sizes that two rows share, to be compared."""
    return {name: row[name] for name in ("context", "batch", "selector")}


def _over_link(rows: Sequence[Row], row: Row) -> Row | None:
    """The same, with KV brought over the link of the same drives to the thread of the step."""
    place = row["way"] if row["place"] == FLASH else row["place"]
    drives = row["drives"]
    return find(rows, way="none", place=place, drives=drives, interval=0, **_sizes(row))


def speeds(rows: Sequence[Row]) -> Table:
    """Tokens per second of all cases without charges for writes."""
    table = Table(
        "Decoding",
        [
            "contexts",
            "batch",
            "selector",
            "attends",
            "KV in",
            "drives",
            "tok/s",
            "x",
            "of drives",
            "late",
        ],
        decimals=2,
        note="x: over the same KV brought over the same drives' link (DRAM: to the same memory). "
        "of drives: bytes of KV per second, as a share of what the drives have together. "
        "late: share of layers in which the host computed longer than the drives would.",
    )
    for row in rows:
        if row["interval"]:
            continue
        share = None
        behind = row["kv_bytes"] * (1 - WINDOW / row["context"])
        moved = behind if row["place"] == FLASH else row["bytes_read"]
        if row["bandwidth"] and row["selector"] == "exact":
            share = moved / row["step_s"] / row["bandwidth"]
        table.add(
            row["context"],
            row["batch"],
            row["selector"],
            row["way"],
            row["place"],
            row["drives"] or None,
            row["tokens_per_s"],
            ratio(row, _over_link(rows, row)),
            share,
            row["late"] / row["tickets"] if row["place"] == FLASH else None,
        )
    return table


def link(rows: Sequence[Row]) -> Table:
    """Bytes over the link, counted and by formula."""
    table = Table(
        "Bytes over the link per row, token and layer",
        [
            *("contexts", "batch", "selector", "attends", "n", "counted", "formula", "ratio"),
            *("KV / link", "16 bit"),
        ],
        decimals=3,
        note="formula: n (2 Hq d + Hq (4 d + 8)) + 4 n_kv d, and a bit per page and KV head where "
        "pages are chosen. 16 bit: KV / link if outputs were of 16 bit and without selection, for "
        "one device, which is (s + 1) / 2 with as many KV heads as heads.",
    )
    most = {name: max(row[name] for row in rows) for name in ("context", "batch")}
    for row in rows:
        largest = all(row[name] == most[name] for name in most)
        if not largest or row["place"] not in (DRAM, FLASH) or row["way"] in ("none", "shared"):
            continue
        if row["interval"]:
            continue
        sent = row["link_bytes"]
        counted, kv = sum(sent.values()), row["kv_bytes"] / row["batch"] / row["layers"]
        alone = row["drives"] < 2
        table.add(
            row["context"],
            row["batch"],
            row["selector"],
            row["way"],
            row["drives"] or 1,
            counted,
            row["link_formula"],
            counted / row["link_formula"],
            kv / counted,
            kv / (2 * sent["query"] + sent["kv"]) if alone else None,
        )
    return table


def scaling(rows: Sequence[Row]) -> Table:
    """Speed of several drives over that of one."""
    table = Table(
        "Several drives against one",
        ["attends", "contexts", "batch", "selector", "drives", "x", "of linear"],
        decimals=2,
        note="What is not KV stays as it is, and grows in share: P4 is the same, for 20 drives.",
    )
    for row in rows:
        if row["place"] != FLASH or row["drives"] == 1 or row["interval"]:
            continue
        one = find(rows, way=row["way"], place=FLASH, drives=1, interval=0, **_sizes(row))
        x = ratio(row, one)
        if x is not None:
            sizes = _sizes(row).values()
            table.add(row["way"], *sizes, row["drives"], x, x / row["drives"])
    return table


def write_back(rows: Sequence[Row]) -> Table:
    """Speed by the tokens between two writes."""
    table = Table(
        "Tokens between two writes, charged to drives that attend",
        ["attends", "contexts", "batch", "drives", "interval", "tok/s", "x"],
        decimals=2,
        note="x: over a write for every token. New rows of K and V, each head's in flash pages of "
        "its own, occupy the drives.",
    )
    charged = [row for row in rows if row["interval"]]
    for row in charged:
        first = find(charged, way=row["way"], interval=1)
        table.add(
            row["way"],
            row["context"],
            row["batch"],
            row["drives"],
            row["interval"],
            row["tokens_per_s"],
            ratio(row, first),
        )
    return table


def writing(rows: Sequence[Row]) -> Table:
    """Cost of the store's own writes by the tokens of a block."""
    table = Table(
        "Tokens between two writes, written by the store",
        [
            *("drive", "interval", "bytes per token", "of KV", "write ms per token"),
            *("step ms", "tok/s", "x"),
        ],
        decimals=2,
        note="One drive, which only writes; contexts are in DRAM. of KV: bytes written over those "
        "of K and V. Writes go on beside steps: tok/s is that of the longer one. x: over a write "
        "for every token.",
    )
    for row in rows:
        first = find(rows, profile=row["profile"], interval=1)
        table.add(
            row["profile"],
            row["interval"],
            round(row["bytes_written"]),
            row["bytes_written"] / row["token_bytes"],
            1e3 * row["write_s"],
            1e3 * row["step_s"],
            row["tokens_per_s"],
            ratio(row, first),
        )
    return table


def x_steps(document: Row) -> dict[str, tuple[Row, XStep]]:
    """Steps by profile: the case of the most drives at the largest sizes, and its step with X, by
    rates that were measured in this run."""
    rows, projected = document["rows"], document["projected"]
    plain = [row for row in rows if not row["interval"] and row["place"] == FLASH]
    if not (plain and projected):
        return {}
    most = {name: max(row[name] for row in plain) for name in ("context", "batch", "drives")}
    rate = max(row["flop"] / row["project_s"] for row in projected)
    shape = XShape(**document["x_shape"])
    found = {}
    for profile in dict.fromkeys(row["way"] for row in plain):
        near = find(plain, way=profile, selector="exact", **most)
        away = None if near is None else _over_link(rows, near)
        if near is None or away is None:
            continue
        kv = near["kv_bytes"]
        rates = XRates(
            storage=kv / near["step_s"], link=away["bytes_read"] / away["step_s"], flops=rate
        )
        step = XStep(shape, rates, tokens=kv / shape.kv_bytes)
        found[profile] = near, step
    return found


def x_cache(document: Row) -> Table:
    """A step by the share of the batch that stores X."""
    table = Table(
        "X-cache: a model with rates of this run",
        [
            *("attends", "drives", "alpha", "projection ms", "measured", "drives ms", "link ms"),
            *("tok/s", "x"),
        ],
        decimals=2,
        note="A step takes the longest of the three. measured: the same projection, done by one "
        "thread. x: over alpha 0. The last alpha of each is the best one.",
    )
    for profile, (near, step) in x_steps(document).items():
        done = {row["requests"] / near["batch"]: row["project_s"] for row in document["projected"]}
        for share in [0.0, *done, step.best()]:
            gpu, drives, link = (1e3 * part for part in step.parts(share))
            measured = None if share not in done else 1e3 * done[share]
            table.add(
                profile,
                near["drives"],
                share,
                gpu,
                measured,
                drives,
                link,
                near["batch"] / step.seconds(share),
                step.seconds(0.0) / step.seconds(share),
            )
    return table


def ablation(document: Row) -> Table:
    """Gains of HILOS' parts, one after the other."""
    table = Table(
        "What each part brings",
        ["part", "attends", "tok/s", "x"],
        decimals=2,
        note="x: over the line above. The longest contexts, the largest batch, the most drives; "
        "without the first part KV comes over the drives' links. X-cache: the model above.",
    )
    rows, with_x = document["rows"], x_steps(document)
    for profile in dict.fromkeys(row["way"] for row in rows if row["interval"]):
        mine = [row for row in rows if row["way"] == profile and row["interval"]]
        steps = [
            ("KV over the link", _over_link(rows, mine[0])),
            ("near storage", find(mine, interval=1)),
            ("+ write-back every 16", find(mine, interval=16)),
        ]
        before: Row | None = None
        for part, row in steps:
            if row is not None:
                table.add(part, profile, row["tokens_per_s"], ratio(row, before))
                before = row
        if before is not None and profile in with_x:
            _, step = with_x[profile]
            share = step.best()
            gain = step.seconds(0.0) / step.seconds(share)
            name = f"+ X-cache, alpha {share:.2f}, model"
            table.add(name, profile, before["tokens_per_s"] * gain, gain)
    return table


def host(document: Row) -> Table:
    """Rates of the host's device, and time of the step's own thread."""
    table = Table(
        "The host's device",
        ["figure", "of", "value", "aim"],
        decimals=2,
        note=f"{document['cpus']} CPUs; load {document['load']:.1f} when the run ended.",
    )
    for row in document["host"]:
        what = f"{row['queries_per_kv']} queries per KV head, {row['threads']} threads"
        read = f"{row['read'] / 1e9:.1f} read"
        table.add(f"attention to DRAM, GB/s, {what}", read, row["attended"] / 1e9, None)
        table.add("its share of reading", "1", row["share"], 0.7)
        table.add("its share of reading, by CPU time", "1", row["cpu_share"], None)
    for row in document["rows"]:
        exact = row["way"] == "host" and row["selector"] == "exact"
        if exact and row["place"] == DRAM:
            name = f"step's thread, us per layer, {row['batch']} x {row['context']}"
            whole = f"{row['step_s'] * 1e3:.1f} ms"
            table.add(f"{name}, clock, median", whole, 1e6 * row["step_thread_s"], 30.0)
            table.add(f"{name}, its CPU time", whole, 1e6 * row["step_thread_cpu_s"], 30.0)
        elif exact:
            name = f"drives' sum, {row['place']}'s link, {row['batch']} x {row['context']}"
            share = row["bytes_read"] / row["step_s"] / row["bandwidth"]
            table.add(name, f"{row['bandwidth'] / MIB:.0f} MiB/s", share, 0.95)
    return table


def by_rows(document: Row) -> Table:
    """Ratios of this run, by the rows of docs/papers.md."""
    table = Table(
        "The papers' rows here",
        ["id", "what", "here"],
        decimals=2,
        note="Ratios of this run, with its sizes. docs/papers.md has the published figures, and "
        "what follows for the papers' own machines.",
    )
    found = _measured(document["rows"]) | _of_parts(document)
    for name, what in ROWS.items():
        table.add(name, what, found.get(name))
    return table


def _measured(rows: Sequence[Row]) -> dict[str, float | str | None]:
    """Measured values of published figures, at the largest sizes."""
    plain = [row for row in rows if not row["interval"]]
    if not plain:
        return {}
    sizes = {name: max(row[name] for row in plain) for name in ("context", "batch")}
    chosen = next((row["selector"] for row in plain if row["selector"] != "exact"), "")
    exact, sparse = {**sizes, "selector": "exact"}, {**sizes, "selector": chosen}

    def twin(profile: str, drives: int, like: dict[str, Any]) -> Row | None:
        return find(plain, way=profile, place=FLASH, drives=drives, **like)

    most = max((row["drives"] for row in plain), default=1)
    one = twin("instinfer", 1, exact)
    slow = find(plain, way="none", place=FLEXGEN, **exact)
    smart = twin("smartssd", most, exact)
    return {
        "P3": ratio(one, slow),
        "P3 our path": ratio(one, find(plain, way="none", place="instinfer", drives=1, **exact)),
        "P4 dense": _of_drives(ratio(twin("instinfer", most, exact), one), most),
        "P4 sparse": _of_drives(
            ratio(twin("instinfer", most, sparse), twin("instinfer", 1, sparse)),
            most,
        ),
        "P5": ratio(twin("instinfer", 1, sparse), slow),
        "P5 our path": ratio(
            twin("instinfer", 1, sparse),
            find(plain, way="none", place="instinfer", drives=1, **sparse),
        ),
        "P6": ratio(twin("instinfer", 1, sparse), one),
        "P18 near storage": ratio(smart, None if smart is None else _over_link(plain, smart)),
    }


def _of_parts(document: Row) -> dict[str, float | str | None]:
    """Figures of HILOS' parts, for as many of its drives as were measured."""
    rows = document["rows"]
    charged = [row for row in rows if row["interval"] and row["way"] == "smartssd"]
    written = [row for row in document["writes"] if row["profile"] == "smartssd"]
    found: dict[str, float | str | None] = {}
    spilled, alone = (
        ratio(find(curve, interval=16), find(curve, interval=1)) for curve in (charged, written)
    )
    if spilled is not None and alone is not None:
        found["P18 write-back"] = f"{spilled:.2f}, where only writes count {alone:.2f}"
    if written:
        best = max(row["tokens_per_s"] for row in written)
        # What is within the noise of the best is as good.
        good = [row["interval"] for row in written if row["tokens_per_s"] > _AS_GOOD * best]
        found["P19"] = f"{min(good)} to {max(good)}"
    return found


def _of_drives(gain: float | None, drives: int) -> str | None:
    """A gain by another number of drives than the paper's 20."""
    return None if gain is None else f"{gain:.2f} of {drives}"
