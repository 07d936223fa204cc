"""Where a call runs and how blocks that do not fit are replaced."""

import pytest
import torch

from flash_attention import launch
from flash_attention.tiling import Blocks

triton = pytest.importorskip("triton")
CPU = torch.device("cpu")


class Device:
    """Runs whatever needs at most ``limit`` rows of Q and K/V together, and remembers."""

    def __init__(self, limit: int):
        self.limit = limit
        self.tried: list[Blocks] = []

    def __call__(self, blocks: Blocks) -> Blocks:
        self.tried.append(blocks)
        needed = (blocks.block_q + blocks.block_kv) * blocks.num_stages
        if needed > self.limit:
            raise triton.runtime.errors.OutOfResources(needed, self.limit, "shared memory")
        return blocks


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    monkeypatch.setattr(launch, "_FITTING", {})


def test_blocks_that_fit_are_taken_as_they_are():
    blocks = Blocks(64, 256, 4, 1)
    assert launch.fitting(Device(1000), blocks, False, CPU) == blocks


def test_blocks_that_do_not_fit_are_halved_until_they_do():
    got = launch.fitting(Device(100), Blocks(64, 256, 8, 3), False, CPU)
    assert (got.block_q, got.block_kv, got.num_warps, got.num_stages) == (64, 32, 8, 1)


def test_what_fits_is_remembered():
    blocks, device = Blocks(64, 256, 4, 1), Device(100)
    first = launch.fitting(device, blocks, False, CPU, "forward")
    device.tried.clear()
    assert launch.fitting(device, blocks, False, CPU, "forward") == first
    assert device.tried == [first]


@pytest.mark.parametrize(("limit", "fixed"), [(100, True), (10, False)])
def test_blocks_that_cannot_be_made_to_fit_are_an_error_that_names_them(limit, fixed):
    with pytest.raises(ValueError, match=r"block_q=.* with block_kv=.* needs .* shared memory"):
        launch.fitting(Device(limit), Blocks(64, 256, 4, 1), fixed, CPU)


# What a tensor map can describe: NVIDIA's CUDA driver API, cuTensorMapEncodeTiled: addresses and
# strides of bytes that 16 divides, the last dimension contiguous.
MAPPED = {
    "contiguous": (torch.zeros(2, 3, 5, 24), True),
    "[B, N, H, D]": (torch.zeros(2, 5, 3, 24).transpose(1, 2), True),
    "rows of 12 bytes": (torch.zeros(2, 3, 5, 3), False),
    "rows of 8 bytes": (torch.zeros(2, 3, 5, 4, dtype=torch.float16), False),
    "rows of 16 bytes": (torch.zeros(2, 3, 5, 8, dtype=torch.float16), True),
    "another address": (torch.zeros(2, 3, 5, 28)[..., 2:26], False),
    "every other column": (torch.zeros(2, 3, 5, 48)[..., ::2], False),
    "columns first": (torch.zeros(2, 3, 24, 8).mT, False),
    "one batch entry for all": (torch.zeros(1, 3, 5, 24).expand(2, 3, 5, 24), False),
}


@pytest.mark.parametrize("name", MAPPED)
def test_tensor_maps_are_for_the_tensors_that_they_can_describe(name):
    t, fits = MAPPED[name]
    assert launch.descriptors_fit(t) == fits
    assert launch.descriptors_fit(torch.zeros(1, 1, 8, 8), t) == fits


def test_float64_on_a_gpu_takes_the_tiles():
    class OnGpu:
        is_cuda = True
        device = torch.device("cuda")
        dtype = torch.float64

    assert not launch.use_triton(OnGpu())
    OnGpu.dtype = torch.bfloat16
    assert launch.use_triton(OnGpu())


MATMUL = torch.backends.cuda.matmul


@pytest.mark.parametrize(
    "allow",
    [
        lambda: setattr(MATMUL, "fp32_precision", "tf32"),
        lambda: setattr(torch.backends, "fp32_precision", "tf32"),
        lambda: setattr(MATMUL, "allow_tf32", True),
        lambda: torch.set_float32_matmul_precision("high"),
    ],
    ids=["fp32_precision of products", "fp32_precision", "allow_tf32", "high"],
)
def test_float32_products_follow_every_setting_of_tf32(allow):
    """PyTorch has older and newer names, and refuses to read an older one that a newer one is at
    odds with."""
    assert launch.dot_precision(torch.float32) == "ieee"
    allow()
    assert launch.dot_precision(torch.float32) == "tf32"
    assert launch.dot_precision(torch.bfloat16) == "ieee"
    MATMUL.fp32_precision = "ieee"
    assert launch.dot_precision(torch.float32) == "ieee"
