"""OpenAI-compatible Files and Batches API on ``vllm serve``, and batches of files offline.

Requests of a batch may run in any order: ``order.py`` brings those with a common prefix together.
"""
