"""Simulation of KV on drives: machines and models as descriptions, and systems that decode on them.

Nothing here measures: every figure of a description has its source, and results are predictions.
"""
