"""Triton kernels, and the PyTorch operators (`ops`) through which the model calls them."""
