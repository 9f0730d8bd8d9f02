"""Benchmarks, run as scripts; installed as ``vllm_ssdkv.profiling``."""
