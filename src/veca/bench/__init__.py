"""Counting and measuring: FLOPs, time, memory, and how far from the machine's floor.

`cases` says what is measured, `contenders` who takes part, `measure` how, `run` puts the three together, `report` and
`plots` show what came out. `python -m veca.bench.memory` measures peak memory of a forward pass on a CPU too.
"""
