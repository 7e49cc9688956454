"""Counting and measuring: FLOPs, time, memory, and how far from the machine's floor.

`cases` says what is measured, `contenders` who takes part, `latency` and `machine` how, `run` puts them together,
`report` and `plots` show what came out. `python -m veca.bench.memory`: peak memory of a forward pass, on a CPU too.
`python -m veca.bench.data`: how fast pictures for training come.
"""
