"""Compute-optimal scaling: what a model costs, which to train, what the runs say."""
