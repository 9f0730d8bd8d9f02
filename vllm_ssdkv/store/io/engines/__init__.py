"""I/O engines behind one protocol, and their noop, faulty and throttled twins."""
