"""A stage that has a result and ends."""

from vllm_ssdkv.profiling.gpu_pack.stage import StageRun


def run(run: StageRun) -> None:
    with run.case("one") as case:
        case.figure("answer", 42, "GB/s")
