"""The stage ``kernels``: every Triton kernel against the native ones and the definition.

A group of cases, one shape and dtype, runs in a process of its own, several at a time: most of the
time goes into compiling, and a kernel that corrupts its process's context spoils no other group.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from vllm_ssdkv.profiling.attention_problem import RowShape
from vllm_ssdkv.profiling.gpu_pack.results import NO_TIME
from vllm_ssdkv.profiling.gpu_pack.stage import StageRun, arguments_of, stage_main
from vllm_ssdkv.profiling.ragged_checks import (
    ROWS,
    check_anywhere,
    check_digest,
    check_ordered_packing,
    check_packing,
    check_ragged,
)
from vllm_ssdkv.profiling.ragged_problem import RowSize
from vllm_ssdkv.profiling.triton_checks import (
    SHAPES,
    Model,
    check_attention,
    check_copies,
    check_sparse,
)

Check = Callable[[torch.device], None]

MOST_WORKERS: Final = 14
_MODULE: Final = "vllm_ssdkv.profiling.gpu_pack.kernels"

DIGEST: Final = "bytes"
SMALLEST: Final = "smallest"
"""Group of one small case of each kernel, for the sanitizer."""

_MODELS: Final = (
    # KV heads, query heads per KV head, head size, tokens of a block
    (8, 4, 128, 64),
    (8, 4, 128, 16),
    (2, 1, 64, 16),
    (2, 5, 64, 128),
    (1, 8, 256, 64),
    (4, 2, 96, 32),
    (3, 3, 80, 16),
    (1, 2, 40, 16),
    (8, 7, 128, 128),
    (2, 16, 128, 64),
)
_MODELS_OF: Final = {
    torch.bfloat16: _MODELS,
    torch.float16: _MODELS[::2],
    torch.float32: _MODELS[1::2],
}
"""Models by dtype: compiling for one takes half a minute of a core."""

_SMALL_SHAPES: Final = (RowShape(1, 50, 0, 51), RowShape(9, 20, 0, 29), RowShape(2, 9, 0, 0))
_SMALL_ROWS: Final = (RowSize(2, 5), RowSize(0, 1), RowSize(1, 20))


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that one process runs, by name."""

    name: str
    cases: Sequence[tuple[str, Check]]


def groups(rehearsal: bool) -> list[Group]:
    """All groups of a run, those of most value first."""
    if rehearsal:
        made = [_group(Model(2, 3, 24, 16, torch.bfloat16), _SMALL_SHAPES, _SMALL_ROWS, (True,))]
    else:
        made = [
            _group(Model(*sizes, dtype), SHAPES, ROWS, (False, True))
            for dtype, models in _MODELS_OF.items()
            for sizes in models
        ]
    return [Group(DIGEST, [("digest, read_words", check_digest)]), *made]


def smallest() -> Group:
    """One small case of each kernel."""
    model = Model(1, 2, 16, 16, torch.bfloat16)
    cases = _group(model, _SMALL_SHAPES, _SMALL_ROWS, (True,)).cases
    return Group(SMALLEST, [*cases, ("digest, read_words", check_digest)])


def _group(
    model: Model,
    shapes: Sequence[RowShape],
    rows: Sequence[RowSize],
    pinned: Sequence[bool],
) -> Group:
    dtype = str(model.dtype).removeprefix("torch.")
    name = (
        f"{dtype}, {model.heads} KV heads, group {model.group}, head size {model.head_size}, "
        f"block {model.block_tokens}"
    )
    cases: list[tuple[str, Check]] = [
        ("attend, finish, merge", partial(check_attention, model=model, shapes=shapes)),
        ("store_kv, pack, unpack", partial(check_copies, model=model)),
        ("sparse decode", partial(check_sparse, model=model)),
    ]
    for lies in pinned:
        where = "pinned host memory" if lies else "device memory"
        lying: dict[str, Any] = {"model": model, "pinned": lies}
        cases += [
            (f"attend to {where}", partial(check_anywhere, **lying)),
            (f"ragged sparse decode in {where}", partial(check_ragged, **lying, rows=rows)),
        ]
    cases.append(("pack with summaries into host memory", partial(check_packing, model=model)))
    cases.append(("pack with alike tokens", partial(check_ordered_packing, model=model)))
    return Group(name, cases)


def run(run: StageRun) -> None:
    """Run all groups; a group whose process dies counts as failed, and the others go on."""
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    for group in groups(run.rehearsal):
        if not all(run.is_done(f"{group.name}: {what}") for what, _ in group.cases):
            todo.put(group.name)
    workers = max(1, min(MOST_WORKERS, (os.cpu_count() or 2) - 1))
    threads = [threading.Thread(target=_work, args=(run, todo)) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _work(run: StageRun, todo: queue.SimpleQueue[str]) -> None:
    while True:
        try:
            name = todo.get_nowait()
        except queue.Empty:
            return
        run_group(run, name)


def run_group(
    run: StageRun,
    name: str,
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a group in a process of its own, under another program if asked to; what it printed.

    Its results are appended by that process, and what went wrong with it by this one.
    """
    left = run.left()
    if left < 1:
        run.failed(name, NO_TIME)
        return ""
    command = [*prefix, sys.executable, "-P", "-m", _MODULE, name, *arguments_of(run)]
    try:
        done = subprocess.run(
            command,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=left,
            env={**os.environ, "OMP_NUM_THREADS": "2", **(environment or {})},
        )
    except subprocess.TimeoutExpired as late:
        printed = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else ""
        print(printed, flush=True)
        run.failed(name, f"{printed[-1500:]}\nit did not end in {left:.0f} s")
        return printed
    except OSError as error:
        run.failed(name, f"it cannot be started: {error}")
        return ""
    print(done.stdout, flush=True)
    if done.returncode:
        run.failed(name, f"{done.stdout[-3000:]}\nits process ended with status {done.returncode}")
    return done.stdout


def run_cases(run: StageRun, group: Group) -> None:
    """Run the cases of a group in this process."""
    device = run.device
    for what, check in group.cases:
        name = f"{group.name}: {what}"
        if run.left() < 1:
            run.failed(name, NO_TIME)
            continue
        with run.case(name):
            check(device)


def main() -> None:
    """A worker's process: runs the group that the first argument names."""
    name = sys.argv[1]

    def work(run: StageRun) -> None:
        known = {group.name: group for group in (*groups(run.rehearsal), smallest())}
        run_cases(run, known[name])

    stage_main(work, sys.argv[2:])


if __name__ == "__main__":
    main()
