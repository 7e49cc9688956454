"""Triton kernels, and the PyTorch operators through which the rest of veca reaches them."""
