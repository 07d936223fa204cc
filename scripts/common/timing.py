"""The time of one call: on a GPU the device's own, not Python's way to the kernels' launch."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

L2_BYTES = 256 * 2**20  # more than any GPU's L2 cache
LEAD_WRITES = 40  # of L2_BYTES each: 2.4 ms of an H200's time, more of a slower GPU's


class Timing(NamedTuple):
    ms: float  # of the device
    launch_ms: float  # until the call returned to Python: on a GPU the device may still work
    result: Any


def cold_buffer(device: torch.device) -> Tensor:
    """What :func:`timed_call` writes on a GPU before it times; nothing on a CPU."""
    return torch.empty(L2_BYTES if device.type == "cuda" else 0, dtype=torch.int8, device=device)


def timed_call(step: Callable[[], Any], cold: Tensor) -> Timing:
    """Time ``step()`` on the device of ``cold``, with nothing of its inputs in the L2 cache.

    The device is given work ahead, as it has in the middle of a training step: a call of 0.2 ms
    whose launch takes Python 0.5 ms would otherwise count as 0.5 ms. Work whose launch takes longer
    than the lead is still seen waiting.
    """
    if not cold.is_cuda:
        start = time.perf_counter()
        result = step()
        ms = 1e3 * (time.perf_counter() - start)
        return Timing(ms, ms, result)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(LEAD_WRITES):
        cold.zero_()
    begin.record()
    start = time.perf_counter()
    result = step()
    launch_ms = 1e3 * (time.perf_counter() - start)
    end.record()
    end.synchronize()
    return Timing(begin.elapsed_time(end), launch_ms, result)
