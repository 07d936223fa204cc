"""Speed of a run: a clock that counts training only, and model FLOPs utilisation (MFU)."""

import re
import time
from collections.abc import Callable

import torch

from flash_attention import launch

# Peak dense TFLOP/s (no structured sparsity) of a whole device, by the name CUDA gives it.
# Half precision means float16 or bfloat16 products summed in float32; GeForce cards run these at
# half the rate NVIDIA prints first. A name that is not matched whole (a laptop variant, a MIG
# slice) is unknown: a wrong peak is worse than none.
#   pattern: (bfloat16, float16, TF32, float32); None where the hardware lacks the format
_PEAK_TFLOPS = {
    # NVIDIA Blackwell: HGX B200 data sheet, per GPU.
    r"NVIDIA B200": (2250.0, 2250.0, 1100.0, 75.0),
    # NVIDIA H200 and H100 Tensor Core GPU data sheets.
    r"NVIDIA H200": (989.4, 989.4, 494.7, 66.9),
    r"NVIDIA H100 \d+GB HBM3|NVIDIA H100 SXM\S*": (989.4, 989.4, 494.7, 66.9),
    r"NVIDIA H100 PCIe": (756.0, 756.0, 378.0, 51.2),
    # NVIDIA A100 Tensor Core GPU data sheet.
    r"NVIDIA A100-(SXM4|PCIE)-\d+GB|NVIDIA A100 80GB PCIe": (312.0, 312.0, 156.0, 19.5),
    # NVIDIA L4, L40S and A10 data sheets.
    r"NVIDIA L4": (121.0, 121.0, 60.0, 30.3),
    r"NVIDIA L40S": (362.0, 362.0, 183.0, 91.6),
    r"NVIDIA A10": (125.0, 125.0, 62.5, 31.2),
    # NVIDIA V100 and T4 data sheets.
    r"Tesla V100-SXM\d-\d+GB\S*": (None, 125.0, None, 15.7),
    r"Tesla V100-PCIE-\d+GB": (None, 112.0, None, 14.0),
    r"(NVIDIA|Tesla) T4": (None, 65.0, None, 8.1),
    # NVIDIA Ampere GA102 and Ada AD102 whitepapers, appendix A.
    r"NVIDIA GeForce RTX 3090": (71.0, 71.0, 35.6, 35.6),
    r"NVIDIA GeForce RTX 4090": (165.2, 165.2, 82.6, 82.6),
}
_COLUMNS = ("bfloat16", "float16", "tf32", "float32")


def product_format(precision: str) -> str:
    """The number format of matrix products under a Trainer precision such as "bf16-mixed"."""
    if precision.startswith("bf16"):
        return "bfloat16"
    if precision.startswith("16"):
        return "float16"
    return "tf32" if launch.allows_tf32() else "float32"


def peak_flops(device_name: str, number_format: str) -> float | None:
    """Peak dense FLOP/s of a device; None when the device or the format on it is unknown.

    number_format: "bfloat16", "float16", "tf32" or "float32".
    """
    column = _COLUMNS.index(number_format)
    for pattern, tflops in _PEAK_TFLOPS.items():
        if re.fullmatch(pattern, device_name):
            return None if tflops[column] is None else tflops[column] * 1e12
    return None


def mfu(tokens_per_s: float, flops_per_token: float, peak: float | None) -> float | None:
    """Model FLOPs utilisation: FLOP/s the model needs at this speed over the peak (0 to 1).

    What a backend recomputes is not work the model needs. None when the peak is unknown.
    """
    return None if peak is None else tokens_per_s * flops_per_token / peak


def device_name(device: torch.device) -> str:
    """The name CUDA gives the device; "cpu" for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def synchronize(device: torch.device) -> None:
    """Wait for the device's queued work; a CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Seconds spent running, on a device that works asynchronously.

    Starting and pausing wait for the device, so that queued work counts on the side of the
    boundary where it was asked for.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._now = now
        self._elapsed = 0.0
        self._started: float | None = None

    def start(self) -> None:
        """Run from here on; without effect on a running watch."""
        if self._started is None:
            synchronize(self._device)
            self._started = self._now()

    def pause(self) -> None:
        """Stand still; without effect on a watch that stands."""
        if self._started is not None:
            synchronize(self._device)
            self._elapsed += self._now() - self._started
            self._started = None

    def lap(self) -> float:
        """Seconds run since the last lap. A running watch keeps running."""
        running = self._started is not None
        self.pause()
        seconds, self._elapsed = self._elapsed, 0.0
        if running:
            self.start()
        return seconds
