"""What a GPU has on the chip and off it: the constants of the IO model.

Capacities follow the CUDA C++ Programming Guide's table of compute capabilities, rates the data
sheets: matrix products of bfloat16 (float16 where there is none) summed in float32, without
structured sparsity.
"""

import re
from dataclasses import dataclass, replace

import torch

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Gpu:
    """Bytes, bytes per second and FLOP/s of one GPU."""

    name: str
    processors: int  # streaming multiprocessors
    shared_memory: int  # bytes, of one program at most
    registers: int  # bytes, of a processor
    l2: int  # bytes
    bandwidth: float  # of the HBM, bytes/s
    flops: float  # peak of matrix products, FLOP/s


KNOWN = {
    "t4": Gpu("T4", 40, 64 * KIB, 256 * KIB, 4 * MIB, 320e9, 65e12),
    "v100": Gpu("V100", 80, 96 * KIB, 256 * KIB, 6 * MIB, 900e9, 125e12),
    "a100": Gpu("A100", 108, 163 * KIB, 256 * KIB, 40 * MIB, 2039e9, 312e12),
    "rtx3090": Gpu("RTX 3090", 82, 99 * KIB, 256 * KIB, 6 * MIB, 936e9, 71e12),
    "rtx4090": Gpu("RTX 4090", 128, 99 * KIB, 256 * KIB, 72 * MIB, 1008e9, 165.2e12),
    "l4": Gpu("L4", 58, 99 * KIB, 256 * KIB, 48 * MIB, 300e9, 121e12),
    "h100": Gpu("H100", 132, 227 * KIB, 256 * KIB, 50 * MIB, 3350e9, 989.4e12),
    "h200": Gpu("H200", 132, 227 * KIB, 256 * KIB, 60 * MIB, 4800e9, 989.4e12),
}

# The driver's names, without NVIDIA, Tesla and GeForce, of the GPUs whose rates these are. Others
# that are called alike have others: PCIe and NVL cards, an A100 of 40 GB, laptops' GPUs, a Ti or a
# D, slices of a GPU (MIG).
DRIVER_NAMES = {
    "T4": "t4",
    "V100-SXM2-16GB": "v100",
    "V100-SXM2-32GB": "v100",
    "A100-SXM4-80GB": "a100",
    "RTX 3090": "rtx3090",
    "RTX 4090": "rtx4090",
    "L4": "l4",
    "H100 80GB HBM3": "h100",
    "H200": "h200",
}


def known(name: str) -> Gpu:
    """The table's entry.

    Raises:
        ValueError: no GPU of that name is in the table.
    """
    if name.lower() not in KNOWN:
        raise ValueError(f"no GPU {name!r} in the table; give one of {', '.join(KNOWN)}")
    return KNOWN[name.lower()]


def query(device: torch.device) -> Gpu:
    """The GPU that PyTorch sees. Capacities are the driver's; rates, which it does not tell, are
    those of the table's GPU of that very name.

    Raises:
        ValueError: the name is not in the table, so its rates are unknown.
    """
    properties = torch.cuda.get_device_properties(device)
    model = DRIVER_NAMES.get(re.sub(r"\b(NVIDIA|Tesla|GeForce) ", "", properties.name))
    if model is None:
        raise ValueError(
            f"the rates of {properties.name} are not in the table; give one of {', '.join(KNOWN)}"
        )
    return replace(
        KNOWN[model],
        name=properties.name,
        processors=properties.multi_processor_count,
        shared_memory=properties.shared_memory_per_block_optin,
        registers=4 * properties.regs_per_multiprocessor,
        l2=properties.L2_cache_size,
    )
