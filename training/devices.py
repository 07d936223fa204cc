"""Which device and precision a run takes: always exactly one device."""

import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from training.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("auto", "32-true", "bf16-mixed", "16-mixed")


@dataclass(frozen=True)
class Hardware:
    """device: "cpu" or "cuda", also Lightning's accelerator name; precision: as Lightning says."""

    device: str
    precision: str
    name: str


def resolve_hardware(device: str, precision: str) -> Hardware:
    """Resolves "auto" and refuses what this machine lacks.

    Raises:
        ConfigError: an unknown value, a GPU that is not there, a precision the device lacks.
    """
    _one_of("device", device, DEVICES)
    _one_of("precision", precision, PRECISIONS)
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ConfigError("device=cuda, but PyTorch sees no CUDA GPU here; give device=cpu or auto")
    if device == "auto":
        device = "cuda" if has_gpu else "cpu"
    # Without emulation: an old GPU would accept bfloat16 and compute it slowly.
    has_bf16 = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "auto":
        precision = "bf16-mixed" if has_bf16 else "32-true"
    if precision == "16-mixed" and device == "cpu":
        raise ConfigError(
            "precision=16-mixed needs a GPU, this run is on the cpu; give 32-true or bf16-mixed"
        )
    if precision == "bf16-mixed" and device == "cuda" and not has_bf16:
        raise ConfigError(
            f"precision=bf16-mixed, but {device_name(device)} has no bfloat16; "
            "give 16-mixed or 32-true"
        )
    return Hardware(device, precision, device_name(device))


def check_offload(offload_checkpoints: bool, hardware: Hardware) -> None:
    """Refuses to move checkpoints to the host of a run that is on the host.

    Raises:
        ConfigError: this run is on a CPU.
    """
    if offload_checkpoints and hardware.device == "cpu":
        raise ConfigError(
            "model.offload_checkpoints=true moves checkpoints off a GPU, this run is on the cpu; "
            "give model.offload_checkpoints=false"
        )


def device_name(device: str) -> str:
    """The model of the GPU or of the processor."""
    return torch.cuda.get_device_name() if device == "cuda" else _cpu_name()


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")  # platform.processor() is empty on most Linux systems
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _one_of(key: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ConfigError(f"{key}={value} is not accepted; give one of {', '.join(accepted)}")
