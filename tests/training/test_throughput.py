"""The device table, MFU and the clock that counts training only."""

import pytest
import torch

from training import throughput
from training.throughput import Stopwatch, mfu, peak_flops, product_format

CPU = torch.device("cpu")


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.mark.parametrize(
    ("name", "number_format", "tflops"),
    [
        ("NVIDIA H200", "bfloat16", 989.4),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756.0),
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312.0),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5),
        ("NVIDIA A100 80GB PCIe", "tf32", 156.0),
        ("NVIDIA L4", "float16", 121.0),
        ("NVIDIA L40S", "bfloat16", 362.0),
        ("NVIDIA A10", "bfloat16", 125.0),
        ("Tesla V100-SXM2-16GB", "float16", 125.0),
        ("Tesla T4", "float16", 65.0),
        ("NVIDIA GeForce RTX 3090", "bfloat16", 71.0),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("NVIDIA B200", "bfloat16", 2250.0),
    ],
)
def test_peak_of_a_known_device(name, number_format, tflops):
    assert peak_flops(name, number_format) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "NVIDIA A10G",  # not an A10
        "NVIDIA L40",  # neither an L4 nor an L40S
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",  # a seventh of one
        "NVIDIA H200 NVL",
    ],
)
def test_a_device_that_only_resembles_a_known_one_has_no_peak(name):
    assert peak_flops(name, "bfloat16") is None


def test_a_format_the_device_lacks_has_no_peak():
    assert peak_flops("Tesla V100-SXM2-16GB", "bfloat16") is None


def test_mfu_is_needed_over_possible_flops():
    assert mfu(1000.0, 6e9, 12e12) == pytest.approx(0.5)


def test_mfu_of_an_unknown_device_is_none():
    assert mfu(1000.0, 6e9, None) is None


@pytest.mark.parametrize(
    ("precision", "expected"),
    [("bf16-mixed", "bfloat16"), ("16-mixed", "float16"), ("32-true", "float32")],
)
def test_format_of_products(precision, expected):
    assert product_format(precision) == expected


def test_float32_products_are_tf32_where_torch_may_use_it():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert product_format("32-true") == "tf32"
    assert product_format("bf16-mixed") == "bfloat16"


def test_a_lap_has_only_the_time_the_watch_ran():
    clock = Clock()
    watch = Stopwatch(CPU, now=clock)
    clock.time += 5  # not started
    watch.start()
    clock.time += 2
    watch.pause()
    clock.time += 30  # stands
    watch.start()
    clock.time += 1
    assert watch.lap() == 3


def test_a_watch_runs_on_after_a_lap():
    clock = Clock()
    watch = Stopwatch(CPU, now=clock)
    watch.start()
    clock.time += 2
    watch.lap()
    clock.time += 7
    assert watch.lap() == 7


def test_a_standing_watch_stands_after_a_lap():
    clock = Clock()
    watch = Stopwatch(CPU, now=clock)
    watch.lap()
    clock.time += 7
    assert watch.lap() == 0


def test_starting_twice_or_pausing_twice_changes_nothing():
    clock = Clock()
    watch = Stopwatch(CPU, now=clock)
    watch.start()
    clock.time += 1
    watch.start()
    clock.time += 1
    watch.pause()
    clock.time += 9
    watch.pause()
    assert watch.lap() == 2


def test_starting_and_pausing_wait_for_the_device(monkeypatch):
    waited = []
    monkeypatch.setattr(throughput, "synchronize", waited.append)
    watch = Stopwatch(CPU)
    watch.start()
    watch.pause()
    assert waited == [CPU, CPU]
