"""What benchmarks stand on: an engine, a rank's store, a child process, measuring by turns."""
