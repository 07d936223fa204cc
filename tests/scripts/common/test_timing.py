"""What a timing counts: the device's work, apart from Python's launching it."""

import time

import pytest
import torch

from scripts.common.timing import cold_buffer, timed_call


def test_on_a_cpu_a_timing_is_the_call_s_own_time():
    cold = cold_buffer(torch.device("cpu"))
    ms, launch_ms, result = timed_call(lambda: time.sleep(0.03) or "done", cold)
    assert 30 <= ms < 300
    assert (launch_ms, result) == (ms, "done")


@pytest.mark.gpu
def test_on_a_gpu_a_slow_launch_does_not_count():
    device = torch.device("cuda")
    cold, x = cold_buffer(device), torch.ones(1000, device=device)

    def slow_to_launch():
        time.sleep(1e-3)
        return x + 1

    timed_call(slow_to_launch, cold)  # loads the kernel
    timings = [timed_call(slow_to_launch, cold) for _ in range(50)]
    assert all(t.launch_ms >= 1 and t.result[0] == 2 for t in timings)
    # Not of each: on a busy CPU some sleep longer than the lead.
    assert min(t.ms for t in timings) < 0.5


@pytest.mark.gpu
def test_on_a_gpu_all_of_the_device_s_work_counts():
    device = torch.device("cuda")
    cold = cold_buffer(device)
    x = torch.empty(2**30, dtype=torch.int8, device=device)
    timed_call(x.zero_, cold)
    # No GPU writes faster than 50 TB/s; the launch of it takes microseconds.
    assert timed_call(lambda: [x.zero_() for _ in range(50)], cold).ms > 50 * 2**30 / 50e9
