"""DRAM of one rank: one mapping, and the plan that divides it."""
