"""The IO model against what is counted elsewhere: the interpreter's loads and stores, PyTorch's
operations, a GPU's counters, and the orders of the paper's theorem."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from flash_attention import flash_attention_v2, gpus, masks, naive_attention, tiling
from flash_attention import io_model as io
from flash_attention.io_model import Shape
from flash_attention.v1 import tables
from tests.flash_attention.parity import make_inputs

CPU = torch.device("cpu")


# The kernels' source, run by the interpreter with each load and store counted ---------------------


@pytest.fixture
def counted(monkeypatch) -> Counter:
    """Bytes by (what, bytes of an element), and FLOPs, of the Triton kernels that run."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("Triton compiles here; it interprets where there is no GPU")
    from triton.runtime.interpreter import InterpreterBuilder

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    counts = Counter()

    def counting(name: str, what: str):
        real = getattr(InterpreterBuilder, name)

        def call(self, *args, **options):
            if name == "create_dot":
                a, b = args[0].data, args[1].data
                counts["flops"] += 2 * a.shape[0] * a.shape[1] * b.shape[1]
                return real(self, *args, **options)
            named = dict(zip(ARGUMENTS[name], args, strict=False))
            size = named["pointers"].get_element_ty().primitive_bitwidth // 8
            counts[what, size] += size * int(np.count_nonzero(named["mask"].data))
            return real(self, *args, **options)

        monkeypatch.setattr(InterpreterBuilder, name, call)

    counting("create_masked_load", "read")
    counting("create_masked_store", "written")
    counting("create_atomic_rmw", "added")
    counting("create_dot", "flops")
    return counts


ARGUMENTS = {
    "create_masked_load": ("pointers", "mask"),
    "create_masked_store": ("pointers", "value", "mask"),
    "create_atomic_rmw": ("op", "pointers", "value", "mask"),
}

# batch, heads, K/V heads, nq, nk, head_dim, causal; block_q, block_kv, splits
KERNELS = [
    (1, 2, 2, 48, 48, 16, False, 16, 32, 1),
    (1, 2, 1, 45, 45, 24, True, 16, 32, 1),
    (2, 2, 1, 40, 56, 16, True, 16, 16, 2),  # Nq < Nk, ragged, grouped, shared rows
    (1, 1, 1, 56, 40, 16, True, 32, 16, 3),  # the first rows see no key; more splits than blocks
    (1, 1, 1, 20, 16, 16, False, 16, 16, 2),  # one block of keys
]


STATISTICS = ("m, l", "m, l, L, D", "L, D")
V2_KERNELS = ("_forward_kernel", "_delta_kernel", "_dk_dv_kernel", "_dq_kernel")
V1_SUMS = (*STATISTICS, "O", "dQ", "dQ, atomic")


def model(accesses: list[io.Access], sums: tuple[str, ...], kernels: tuple[str, ...]) -> Counter:
    """The model's bytes in the fixture's terms. Inputs and gradients have 2 bytes an element, sums
    and statistics 4."""
    counts = Counter()
    for kernel, tensor, read, written in accesses:
        if kernel not in kernels:
            continue
        size = 4 if tensor in sums else 2
        if tensor == "dQ, atomic":
            counts["added", size] += written
        else:
            counts["read", size] += read
            counts["written", size] += written
    return +counts


def made(case: tuple) -> tuple[Shape, list]:
    batch, heads, kv_heads, nq, nk, head_dim, causal, *_ = case
    inputs = make_inputs(batch, heads, kv_heads, nq, nk, head_dim, torch.float16, CPU)
    return Shape(batch, heads, nq, nk, head_dim, kv_heads, causal=causal), [
        t.detach() for t in inputs
    ]


OPTIONS = dict(scale=0.3, dropout_p=0.0, seed=None, segment_ids=None)


@pytest.mark.parametrize("case", KERNELS, ids=str)
def test_the_forward_kernel_loads_and_stores_what_the_model_says(case, counted):
    from flash_attention.v1 import forward

    shape, (q, k, v, _) = made(case)
    *_, block_q, block_kv, splits = case
    blocks = tiling.Blocks(block_q, block_kv)
    forward.forward(q, k, v, causal=shape.causal, splits=splits, blocks=blocks, **OPTIONS)
    flops = counted.pop("flops")
    said = io.flash_forward(shape, block_q, block_kv, splits)
    assert counted == model(said, V1_SUMS, ("_forward_kernel",))
    # The kernel pads the head dim to a power of two; the model counts the products that matter.
    padded = tiling.padded_head_dim(shape.head_dim) / shape.head_dim
    assert flops == padded * io.flash_flops(shape, block_q, block_kv)


@pytest.mark.parametrize("case", KERNELS, ids=str)
def test_the_backward_kernels_load_and_store_what_the_model_says(case, counted):
    from flash_attention.v1 import backward

    shape, (q, k, v, do) = made(case)
    *_, block_q, block_kv, splits = case
    blocks = tiling.Blocks(block_q, block_kv)
    m = torch.zeros(q.shape[:3])
    backward.backward(
        do, q, k, v, q, m, m + 1, causal=shape.causal, splits=splits, blocks=blocks, **OPTIONS
    )
    flops = counted.pop("flops")
    said = io.flash_backward(shape, block_q, block_kv, splits)
    assert counted == model(said, V1_SUMS, ("_delta_kernel", "_backward_kernel"))
    padded = tiling.padded_head_dim(shape.head_dim) / shape.head_dim
    assert flops == padded * io.flash_flops(shape, block_q, block_kv, backward=True)


@pytest.mark.parametrize("case", KERNELS, ids=str)
def test_v2_s_kernels_load_and_store_what_the_model_says(case, counted):
    shape, inputs = made(case)
    q, k, v, do = inputs
    *_, block_q, block_kv, _ = case
    padded = tiling.padded_head_dim(shape.head_dim) / shape.head_dim
    o = flash_attention_v2(
        *(t.requires_grad_() for t in (q, k, v)),
        causal=shape.causal, block_q=block_q, block_kv=block_kv,
    )  # fmt: skip
    assert counted.pop("flops") == padded * io.flash_flops(shape, block_q, block_kv)
    said = io.flash_v2_forward(shape, block_q, block_kv)
    assert counted == model(said, STATISTICS, V2_KERNELS)
    counted.clear()

    torch.autograd.grad(o, (q, k, v), do)
    blocks = (block_q, block_kv) * 2
    assert counted.pop("flops") == padded * io.flash_v2_backward_flops(shape, *blocks)
    said = io.flash_v2_backward(shape, *blocks)
    assert counted == model(said, STATISTICS, V2_KERNELS)


# Counters of a GPU --------------------------------------------------------------------------------

SECTOR = 32  # bytes

# lts__t_sectors_srcunit_tex_op_{read,write,red} of one H200 at batch 1, N = 16,384, causal,
# bfloat16, and l1tex__t_sectors_pipe_lsu_mem_local_op_{ld,st}, which spilled registers add to them.
# Forward with 8 splits: 256 programs.
H200_FORWARD_64 = dict(read=266_542_524 - 24_573_076, write=141_926_400 - 1_351_680)
H200_FORWARD_128 = dict(read=254_420_064 - 14_445_548, write=140_124_160 - 1_679_436)
H200_BACKWARD_64 = dict(read=281_624_706, write=4_194_304, red=270_532_608)


@pytest.mark.parametrize(
    ("heads", "head_dim", "counters"), [(32, 64, H200_FORWARD_64), (16, 128, H200_FORWARD_128)]
)
def test_the_forward_model_is_what_an_h200_moved_between_its_processors_and_l2(
    heads, head_dim, counters
):
    shape = Shape(1, heads, 16_384, 16_384, head_dim, causal=True)
    blocks = tiling.tuned(tables.FORWARD, head_dim, 2)
    said = io.flash_forward(shape, blocks.block_q, blocks.block_kv, splits=8)
    read, written = io.traffic(said, "_forward_kernel")
    assert read == pytest.approx(SECTOR * counters["read"], rel=2e-3)
    assert written == pytest.approx(SECTOR * counters["write"], rel=1e-6)


def test_the_backward_model_is_what_an_h200_moved_between_its_processors_and_l2():
    shape = Shape(1, 32, 16_384, 16_384, 64, causal=True)
    said = [a for a in io.flash_backward(shape, 64, 128) if a.kernel == "_backward_kernel"]
    atomic = next(a for a in said if a.tensor == "dQ, atomic")
    read, written = io.traffic([a for a in said if a is not atomic])
    assert atomic.written == SECTOR * H200_BACKWARD_64["red"]
    assert written == SECTOR * H200_BACKWARD_64["write"]
    assert read == pytest.approx(SECTOR * H200_BACKWARD_64["read"], rel=6e-3)  # L1 kept some


# Standard attention -------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Bytes of the floating-point operands and results of every operation that is not a view."""

    def __init__(self):
        super().__init__()
        self.read = self.written = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        operands = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
        places = {t.untyped_storage().data_ptr() for t in operands}
        results = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        if any(t.untyped_storage().data_ptr() in places for t in results):
            return out
        if not any(t.is_floating_point() for t in results):
            return out  # the mask's making
        read, written = (sum(t.nbytes for t in ts) for ts in (operands, results))
        if "masked_fill" in func.name():  # a copy, which is then filled in place
            read, written = read + written, 2 * written
        self.read, self.written = self.read + read, self.written + written
        return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        ("cpu", torch.bfloat16),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_naive_attention_moves_what_the_model_says(device, dtype, causal):
    q, k, v, do = make_inputs(2, 3, 3, 40, 40, 16, dtype, torch.device(device))
    shape = Shape(2, 3, 40, 40, 16, element_size=q.element_size(), causal=causal)
    with Operations() as forward:
        o = naive_attention(q, k, v, causal=causal)
    with Operations() as backward:
        torch.autograd.grad(o, (q, k, v), do)
    assert (forward.read, forward.written) == io.traffic(io.naive_forward(shape))
    assert (backward.read, backward.written) == io.traffic(io.naive_backward(shape))


@pytest.mark.parametrize("count", [io.naive_forward, io.naive_backward])
def test_heads_that_naive_attention_would_copy_are_refused(count):
    with pytest.raises(ValueError, match="kv_heads=1 with heads=4 is not counted"):
        count(Shape(2, 4, 40, 40, 16, kv_heads=1))
    assert count(Shape(2, 4, 40, 40, 16, kv_heads=4)) == count(Shape(2, 4, 40, 40, 16))


def test_naive_flops_are_those_that_pytorch_counts():
    q, k, v, do = make_inputs(2, 3, 3, 40, 48, 16, torch.float32, CPU)
    shape = Shape(2, 3, 40, 48, 16)
    with FlopCounterMode(display=False) as forward:
        o = naive_attention(q, k, v)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(o, (q, k, v), do)
    assert io.naive_flops(shape) == forward.get_total_flops()
    assert io.naive_flops(shape, backward=True) == backward.get_total_flops()


# The paper ----------------------------------------------------------------------------------------


def elements(accesses: list[io.Access], size: int = 1) -> float:
    return sum(io.traffic(accesses)) / size


@pytest.mark.parametrize(("n", "d"), [(64, 16), (1000, 64)])
def test_standard_attention_is_the_sum_of_the_paper_s_lines(n, d):
    """Algorithms 0 and 3: every load and store of an N x N and an N x d matrix, by hand."""
    shape = Shape(1, 1, n, n, d)
    assert elements(io.standard_forward(shape), 2) == 4 * n * d + 4 * n * n
    assert elements(io.standard_backward(shape), 2) == 8 * n * d + 7 * n * n


@pytest.mark.parametrize(("n", "d", "block_kv"), [(512, 64, 128), (4096, 128, 256)])
def test_flash_attention_passes_over_q_and_o_once_per_block_of_keys(n, d, block_kv):
    """The proof of Theorem 2: K and V once, then Tc passes over Q, O, m and l."""
    passes = n // block_kv
    shape = Shape(1, 1, n, n, d, element_size=4)
    said = io.flash_forward(shape, 64, block_kv)
    read, written = (t / 4 for t in io.traffic(said, "_forward_kernel"))
    assert read == 2 * n * d + passes * (2 * n * d + 2 * n)
    assert written == passes * (n * d + 2 * n)


def moved(n: int, d: int, on_chip: int) -> float:
    """Elements of a flash forward at the paper's blocks for M = on_chip elements."""
    block_q, block_kv = tiling.paper_blocks(on_chip, d)
    said = io.flash_forward(Shape(1, 1, n, n, d, element_size=4), block_q, block_kv)
    return sum(io.traffic(said, "_forward_kernel")) / 4


# N is far beyond Bc, so that passes over Q and O outweigh what is read once.
SIZES = list(itertools.product([2**16, 2**18], [64, 128], [2**14, 2**16]))


@pytest.mark.parametrize(("n", "d", "on_chip"), SIZES)
def test_flash_traffic_has_the_theorem_s_order(n, d, on_chip):
    """N^2 d^2 / M: four times at twice N, four times at twice d, half at twice M; and the constant
    is 12: 4 N d / M passes over Q, O in and O out."""
    here = moved(n, d, on_chip)
    assert moved(2 * n, d, on_chip) / here == pytest.approx(4, rel=0.03)
    assert moved(n, 2 * d, on_chip) / here == pytest.approx(4, rel=0.06)  # m and l do not grow
    assert moved(n, d, 2 * on_chip) / here == pytest.approx(1 / 2, rel=0.03)
    assert here / io.flash_elements(n, d, on_chip) == pytest.approx(12, rel=0.1)


def test_standard_traffic_has_the_theorem_s_order():
    def here(n, d):
        return elements(io.standard_forward(Shape(1, 1, n, n, d)), 2)

    assert here(2**15, 64) / here(2**14, 64) == pytest.approx(4, rel=0.01)
    assert here(2**14, 128) / here(2**14, 64) == pytest.approx(1, rel=0.01)
    assert here(2**14, 64) / io.standard_elements(2**14, 64) == pytest.approx(4)


# The loops ----------------------------------------------------------------------------------------

LOOPS = [(48, 48, False), (45, 45, True), (40, 56, True), (56, 40, True), (64, 64, True)]


def seen(nq: int, nk: int, causal: bool) -> torch.Tensor:
    """Which row may see which key, ``[Nq, Nk]``."""
    rows, keys = masks.positions(0, nq, CPU), masks.positions(0, nk, CPU)
    mask = masks.visible(rows, keys, nq, nk, causal, None)
    return torch.ones(nq, nk, dtype=torch.bool) if mask is None else mask


@pytest.mark.parametrize(("nq", "nk", "causal"), LOOPS)
def test_the_inner_loop_walks_the_blocks_with_a_row_that_sees_a_key(nq, nk, causal):
    mask = seen(nq, nk, causal)
    tiles = [[t.any().item() for t in c.split(16)] for c in mask.split(32, dim=1)]
    walked = io.row_blocks(Shape(1, 1, nq, nk, 16, causal=causal), 16, 32)
    assert [[i in w for i in range(len(t))] for w, t in zip(walked, tiles, strict=True)] == tiles


@pytest.mark.parametrize(("nq", "nk", "causal"), LOOPS)
def test_v2_reads_the_keys_of_each_visible_tile_and_writes_o_once(nq, nk, causal):
    mask = seen(nq, nk, causal)
    keys = sum(c.shape[1] for r in mask.split(16) for c in r.split(32, dim=1) if c.any())
    read, written = io.traffic(io.flash_v2_forward(Shape(2, 3, nq, nk, 16, causal=causal), 16, 32))
    assert read == 6 * (nq * 16 * 2 + 2 * keys * 16 * 2)
    assert written == 6 * nq * (16 * 2 + 2 * 4)


@pytest.mark.parametrize(("nq", "nk", "causal"), LOOPS)
def test_v2_s_two_backward_kernels_walk_the_visible_tiles_of_their_own_blocks(nq, nk, causal):
    """dK and dV: 16 x 32; dQ: 32 x 16."""
    mask = seen(nq, nk, causal)
    visible = [
        [c for r in mask.split(block_q) for c in r.split(block_kv, dim=1) if c.any()]
        for block_q, block_kv in ((16, 32), (32, 16))
    ]
    rows = sum(len(tile) for tile in visible[0])
    keys = sum(tile.shape[1] for tile in visible[1])
    shape = Shape(2, 3, nq, nk, 16, causal=causal)
    said = io.flash_v2_backward(shape, 16, 32, 32, 16)
    read, written = io.traffic(said, "_dk_dv_kernel")
    assert read == 6 * (2 * nk * 16 * 2 + rows * (2 * 16 * 2 + 2 * 4))
    assert written == 6 * 2 * nk * 16 * 2
    read, written = io.traffic(said, "_dq_kernel")
    assert read == 6 * (nq * (2 * 16 * 2 + 2 * 4) + 2 * keys * 16 * 2)
    assert written == 6 * nq * 16 * 2
    tile = 2 * 16 * 32 * 16  # of one product
    products = 4 * len(visible[0]) + 3 * len(visible[1])
    assert io.flash_v2_backward_flops(shape, 16, 32, 32, 16) == 6 * products * tile


# The roofline -------------------------------------------------------------------------------------

TOY = gpus.Gpu("toy", 1, 1, 1, 1, bandwidth=10.0, flops=200.0)


@pytest.mark.parametrize(
    ("flops", "moved_bytes", "bound", "seconds"),
    [(1000, 100, "memory", 10.0), (4000, 100, "compute", 20.0), (2000, 100, "compute", 10.0)],
)
def test_the_roofline_is_the_slower_of_memory_and_products(flops, moved_bytes, bound, seconds):
    line = io.roofline(flops, moved_bytes, TOY)
    assert (line.bound, line.seconds) == (bound, seconds)
    assert (line.intensity, line.ridge) == (flops / moved_bytes, 20.0)
    assert line.attainable * line.seconds == pytest.approx(flops)
