"""Helpers that know nothing of the model: files, text, console, signals, devices, timing."""
