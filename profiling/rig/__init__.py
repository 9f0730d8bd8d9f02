"""Foundations of benchmarks: an engine, a rank's store, a child process, turns, pictures."""
