"""What a researcher runs: data, training, compute-optimal sweeps, evaluation, benchmarks.

The top layer of the project. It may import ``models`` and ``pallas_flash``; neither of
them imports it.
"""
