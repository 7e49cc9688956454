"""Fine-tuning on one's own labels: `veca finetune`.

A layer above `train` and `probe`, as the command line is, and nothing below knows of it: datasets, views, heads and
scores are those of the probes, the log, the checkpoints and the schedule those of training.
"""
