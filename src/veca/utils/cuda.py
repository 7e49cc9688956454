"""CUDA before torch is there: settings that it reads once, and an early start."""

import ctypes
import os
import threading


def separate_streams() -> None:
    """Give each stream of a GPU a queue of its own; it has no effect once CUDA has started.

    CUDA makes streams share eight queues, and a stream whose queue the model uses waits for the model: the JPEG decoder
    of `veca embed` would be several times slower.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def start_cuda() -> threading.Thread:
    """Start CUDA and its first device in a thread, which takes about a second, while this one imports torch.

    torch then finds the context that it would have made. Nothing happens where there is no driver or no device.
    """
    separate_streams()
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does
    thread = threading.Thread(target=_make_context, name="start CUDA", daemon=True)
    thread.start()
    return thread


def _make_context(library: str = "libcuda.so.1") -> None:
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
