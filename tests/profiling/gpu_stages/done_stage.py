"""A stage that has nothing left to do."""

from vllm_ssdkv.profiling.gpu_pack.stage import StageRun


def run(run: StageRun) -> None:
    del run
