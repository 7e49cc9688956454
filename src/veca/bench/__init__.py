"""Counting and measuring: FLOPs, latency, memory."""
