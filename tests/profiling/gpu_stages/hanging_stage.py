"""A stage that does not end when it is asked to, and has a child that does not, either."""

import os
import signal
import subprocess
import sys
import time

from vllm_ssdkv.profiling.gpu_pack.stage import StageRun

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def run(run: StageRun) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", DEAF])
    with run.case("begun") as case:
        case.figure("process", os.getpid())
        case.figure("child", child.pid)
    time.sleep(600)
