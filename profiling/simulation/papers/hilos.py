"""HILOS (Jang et al., ASPLOS 2026): rows P16 to P22.

The paper's ablation does not name batch and length for each bar. Assumed: OPT-66B, 16 contexts of
32,768 tokens, an A100. FlexGen has four plain drives in the server and no chassis, as the paper
says of its baseline (section 3.1, table 1).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from vllm_ssdkv.profiling.offload.published import x_share
from vllm_ssdkv.profiling.simulation import systems
from vllm_ssdkv.profiling.simulation.decode import Setting, StepResult, decode
from vllm_ssdkv.profiling.simulation.hardware import (
    Drive,
    Gpu,
    Host,
    Link,
    Machine,
    NearStorage,
    find,
)
from vllm_ssdkv.profiling.simulation.model_shape import ModelShape, find_model
from vllm_ssdkv.profiling.simulation.papers.result import Result, Target
from vllm_ssdkv.profiling.simulation.storage import PlainDrive, Storage

PAPER = "HILOS (ASPLOS 2026)"
DRIVES = 16
PLAIN_DRIVES = 4
"""Drives of FlexGen's server, without a chassis: section 3.1 and table 1."""
BATCH = 16
CONTEXT = 32768
LONG_REQUEST = 8192
"""Tokens of one long request; assumed."""
INTERVALS = (1, 2, 4, 8, 16, 32, 64)
SAME = 1e-6
"""Relative difference below which two times are one."""


def _setting(storage: Storage, *, in_chassis: bool = True) -> Setting:
    link = find(Link, "pcie4-x16").bandwidth
    slots = storage.count * find(Link, "pcie4-x4").bandwidth
    chassis = find(Link, "hilos-chassis").bandwidth if in_chassis else slots
    machine = Machine(find(Gpu, "a100-40"), link, chassis, storage.count)
    return Setting(machine, storage, find_model("opt-66b"), BATCH, CONTEXT)


@cache
def near(spill_tokens: int = 16, share: float = 0.0, drives: int = DRIVES) -> StepResult:
    """A step of HILOS."""
    system = systems.hilos(x_share=share, spill_tokens=spill_tokens)
    return decode(system, _setting(systems.attending_drives("hilos-smartssd", drives)))


@cache
def flexgen() -> StepResult:
    """A step of FlexGen with KV on plain drives in the server."""
    return decode(systems.flexgen_with_weights_in_dram(), _setting(_plain(), in_chassis=False))


@cache
def flexgen_in_chassis() -> StepResult:
    """The same on HILOS' drives, which attend to nothing."""
    storage = systems.attending_drives("hilos-smartssd", DRIVES)
    return decode(systems.flexgen_with_weights_in_dram(), _setting(storage))


@cache
def good_path() -> StepResult:
    """A step with FlexGen's drives behind O_DIRECT and io_uring."""
    return decode(
        replace(systems.good_path(), weights="dram"), _setting(_plain(), in_chassis=False)
    )


def _plain() -> Storage:
    return Storage.alike(PlainDrive(find(Drive, "pm9a3")), PLAIN_DRIVES)


def share_of_x() -> float:
    """The paper's share of the batch that keeps X, by its closed form."""
    inside = DRIVES * find(NearStorage, "hilos-smartssd").drive.read_bandwidth
    return x_share(inside, find(Link, "hilos-chassis").bandwidth)


def best_interval() -> int:
    """Fewest tokens between two writes with which a step is as short as with any."""
    least = min(near(tokens).seconds for tokens in INTERVALS)
    return next(tokens for tokens in INTERVALS if near(tokens).seconds <= least * (1 + SAME))


def kernel_flops(group: int) -> float:
    """FLOP/s of the accelerator with so many query heads per KV head: two per number and head."""
    rate = find(NearStorage, "hilos-smartssd").attend_bandwidth or 0.0
    return rate / 2 * 2 * group


def written_bytes(model: ModelShape, tokens: int, share: float) -> float:
    """Bytes that a request of so many tokens leaves on drives."""
    kv, x = model.kv_bytes_per_token(), model.x_bytes_per_token()
    return tokens * (kv * (1 - share) + x * share)


def lifetime_requests(share: float) -> float:
    """Long requests to a model of 175B until all drives are worn out."""
    drive = find(NearStorage, "hilos-smartssd")
    life = DRIVES * (drive.endurance_bytes or 0.0)
    return life / written_bytes(find_model("opt-175b"), LONG_REQUEST, share)


def price_ratio() -> float:
    """Price of HILOS' machine over that of FlexGen's, which has no chassis."""
    host, gpu = find(Host, "hilos-host"), find(Gpu, "a100-40")
    near_drive, drive = find(NearStorage, "hilos-smartssd"), find(Drive, "pm9a3")
    base = (host.price_usd or 0) + (gpu.price_usd or 0)
    own = base + (host.chassis_usd or 0) + DRIVES * (near_drive.price_usd or 0)
    return own / (base + PLAIN_DRIVES * (drive.price_usd or 0))


def chassis_ratio() -> float:
    """The same, with a chassis full of plain drives for FlexGen."""
    host, gpu = find(Host, "hilos-host"), find(Gpu, "a100-40")
    near_drive, drive = find(NearStorage, "hilos-smartssd"), find(Drive, "pm9a3")
    base = (host.price_usd or 0) + (gpu.price_usd or 0) + (host.chassis_usd or 0)
    return (base + DRIVES * (near_drive.price_usd or 0)) / (base + DRIVES * (drive.price_usd or 0))


def _ablation() -> list[Result]:
    """P17 to P19."""
    alpha = share_of_x()
    one, spilled, full = near(1), near(), near(share=alpha)
    slow, table = flexgen(), PAPER
    return [
        Result(
            *("P17", "", "16 devices, all on, against FlexGen on SSDs, long contexts"),
            Target.band(5.3, 7.8, 0.10),
            slow.seconds / full.seconds,
            source=table,
            note="FlexGen's copies go through a pinned buffer, and each waits for the one before: "
            "drives, memory, link in turn, by its code. On 16 drives of the chassis it then has "
            f"{slow.seconds / flexgen_in_chassis().seconds:.2f} of its speed; the paper says 0.64 "
            "to 0.94.",
            beside=good_path().seconds / full.seconds,
        ),
        Result(
            *("P18", "near storage", "attention near storage, written back at once"),
            Target.near(3.39, 0.20, "3.39x"),
            slow.seconds / one.seconds,
            source=table,
            note="As P17. In InstInfer's testbed FlexGen gets 0.91 GB/s of one drive, here 3.1 of "
            "each of four: the papers do not agree on it.",
            beside=good_path().seconds / one.seconds,
        ),
        Result(
            *("P18", "write-back", "every 16 tokens against every token"),
            Target.near(1.32, 0.20, "1.32x"),
            one.seconds / spilled.seconds,
            source=table,
            note="At once: direct writes of single rows, each of which a drive reads, changes and "
            "programs before the next, and attention waits. Times of the page are those of the "
            "flash. By bytes alone the ratio would be 1.00.",
        ),
        Result(
            *("P18", "X-cache", "X in place of KV for a share of the batch"),
            Target.near(1.64, 0.20, "1.64x"),
            spilled.seconds / full.seconds,
            source=table,
            note="4/3 is the bound where drives and link are the limit: more needs a path for X "
            "beside that of KV.",
        ),
        Result(
            *("P19", "best", "best tokens between two writes"),
            Target.near(16, 0),
            float(best_interval()),
            source=table,
            note="16 rows of 256 bytes fill a page; more is as good in the simulator.",
        ),
        Result(
            *("P19", "loss", "every 64 tokens against every 16"),
            Target.above(1.3, "more than 1.3x"),
            near(64).seconds / spilled.seconds,
            source=table,
            note="By bytes and FLOP what waits is below 1 % of a step: tried with its values sent "
            "to the drives, and with the host's scores. The loss would need 4.4 us of the host for "
            "each row that waits, and the paper does not say what takes them.",
        ),
    ]


def results() -> list[Result]:
    """Rows P16 to P22."""
    alpha = share_of_x()
    speedup = flexgen().seconds / near(share=alpha).seconds
    kernel = [
        Result(
            *("P20", f"G = {group}", "accelerator, GFLOP/s"),
            Target.near(published, 0.05),
            kernel_flops(group) / 1e9,
            source=PAPER,
            basis="calibrated" if group == 1 else "predicted",
            note="One rate of the stream of KV for all: the middle of what the paper reaches.",
        )
        for group, published in ((1, 11.9), (4, 46.8), (5, 56.3))
    ]
    return [
        Result(
            *("P16", "", "share of X with drives three times as fast as their link"),
            Target.near(0.5, 0),
            alpha,
            source=PAPER,
            note="The closed form; of tenths, 0.5 is also the best in the simulator.",
        ),
        *_ablation(),
        *kernel,
        Result(
            *("P21", "ratio", "endurance with X-cache against without"),
            Target.near(1.34, 0.03, "1.34x"),
            lifetime_requests(alpha) / lifetime_requests(0),
            source=PAPER,
        ),
        Result(
            *("P21", "requests", "long requests to 175B in the life of 16 drives, millions"),
            Target.near(4.08, 0.03),
            lifetime_requests(alpha) / 1e6,
            source=PAPER,
            note=f"Assumes {LONG_REQUEST:,} tokens. The paper takes classes of Azure's traces and "
            "does not print their length; 7,770 would give its figure. Tried: 350 tokens of output "
            "more, 3.71. A token of 4.5 MiB that is counted as 4.5 MB would give 4.06.",
        ),
        Result(
            *("P22", "", "tokens per USD, 66B, against FlexGen"),
            Target.near(2.02, 0.03, "2.02x"),
            speedup / price_ratio(),
            source=PAPER,
            note="Prices are the paper's: server, GPU and four drives against server, GPU, chassis "
            "and 16 SmartSSDs; so 2.02 is a speedup of 6.03, and ours (P17) is "
            f"{speedup:.2f}. Tried: a chassis with 16 plain drives for FlexGen, "
            f"{speedup / chassis_ratio():.2f}. The paper prints the most of several settings, "
            "which it does not name; of 4 to 32 requests of 8,192 to 131,072 tokens none is above "
            "that here, where drives and link are the limit.",
        ),
    ]
