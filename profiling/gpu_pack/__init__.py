"""Checks and measurements of everything that needs a GPU and no vLLM, in one command.

``scripts/gpu/pack.sh`` makes the folder that travels to a machine without a network;
``scripts/gpu/run.sh`` runs the stages there, each in a process of its own with a time limit.
"""
