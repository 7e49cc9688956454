"""Helpers that do not depend on the model: files, text, console, progress, signals, devices, timing."""
