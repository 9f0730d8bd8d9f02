"""Published results of four papers, and of FlexGen, beside what the simulator says."""
