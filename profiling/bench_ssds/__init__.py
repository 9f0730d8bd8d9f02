"""Several SSDs: does their speed add up, for one request, for many, and with a slow one.

``python -P -m vllm_ssdkv.profiling.bench_ssds`` makes the devices (see
``vllm_ssdkv.profiling.vssd``), shows with fio that they behave as they should, measures, and
removes them.
"""
