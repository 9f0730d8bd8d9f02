"""A stage with a case that fails, one that does not, much to say, and a status."""

import sys

from vllm_ssdkv.profiling.gpu_pack.stage import StageRun


def run(run: StageRun) -> None:
    with run.case("wrong") as case:
        case.figure("half", 0.5)
        raise ValueError("not what it should be")
    with run.case("right"):
        print("x" * 100 * 100_000)
    sys.exit(7)
