"""Faults that attention kernels have had, each where a version of FlashAttention
would show it.

repository#number is the issue or pull request in which the fault was found.
"""

import itertools
import math
import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from flash_attention import dropout, flash_attention_v1, launch, naive_attention
from flash_attention.v2 import tables
from tests.flash_attention import layouts
from tests.flash_attention.parity import (
    assert_as_exact_as_naive,
    make_inputs,
    results,
    upcast,
)
from tests.flash_attention.versions import V2, Version
from tests.flash_attention.watch import Guard, enter_inside

SMALL_BLOCKS = dict(block_q=32, block_kv=32)  # several blocks each way at the interpreter's sizes
TINY_BLOCKS = dict(block_q=16, block_kv=16)


@pytest.fixture(autouse=True)
def tensor_maps(monkeypatch):
    """V2 loads by tensor maps wherever they fit, in float32 too, which its tables leave to pointers
    (as do inputs here that no tensor map fits): both ways are to be free of these faults."""
    for table in (tables.FORWARD, tables.DK_DV, tables.DQ):
        for key, blocks in table.items():
            monkeypatch.setitem(table, key, replace(blocks, descriptors=True))


TURNS = "the next one has this; slow through the interpreter"


def slow(flash: Version, device: torch.device) -> bool:
    """V2 through the interpreter: V1 has all cases there, the GPU all of both."""
    return flash is V2 and device.type == "cpu" and launch.interpreting()


def assert_equal_to_naive(got: dict[str, Tensor], q, k, v, do, **options) -> None:
    want = results(naive_attention, *upcast(q, k, v, do), **options)
    for name in want:
        torch.testing.assert_close(got[name].double(), want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.v2_interpreted
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [2.0**9, 2.0**50], ids=["4e6", "2e31"])
@pytest.mark.parametrize("sign", [-1.0, 1.0], ids=["below", "above"])
def test_equal_scores_share_the_weight_however_large_they_are(flash, device, causal, size, sign):
    """Every score is +-16 size^2.

    Below: a masked score that is 0, or finite as -1e6 and -1e30 are, would win, in forward or
    where backward takes exp again (aiter#3551, flash-attention#1947). Above: a log-sum-exp would
    swallow log n, which m and l keep apart (pytorch#125674).
    """
    n = 45
    q, k, v, do = make_inputs(1, 1, 1, n, n, 16, torch.float32, device)
    with torch.no_grad():
        q.fill_(size)
        k.fill_(sign * size)
    # In base 2 these scores are exact: a factor that rounds would tell masked tiles from others.
    got = results(flash, q, k, v, do, causal=causal, scale=math.log(2.0), **SMALL_BLOCKS)
    p = torch.ones(n, n, dtype=torch.float64, device=device)
    p = p.tril() if causal else p
    p = p / p.sum(-1, keepdim=True)
    for name, want in (("o", p @ v.double()), ("dv", p.mT @ do.double())):
        torch.testing.assert_close(got[name].double(), want, rtol=1e-5, atol=1e-6)
    assert got["dq"].isfinite().all()
    assert got["dk"].isfinite().all()


@pytest.mark.v2_interpreted
@pytest.mark.filterwarnings("ignore:overflow encountered")  # NumPy's, in the interpreter
@pytest.mark.parametrize("hidden", [slice(0, 16), slice(16, 32), slice(0, 5)], ids=str)
def test_a_product_that_overflows_to_minus_infinity_has_no_weight(flash, device, hidden):
    """A whole tile of them has a maximum of -inf, be it the first or a later one."""
    q, k, v, do = make_inputs(1, 1, 1, 48, 48, 16, torch.float32, device)
    with torch.no_grad():
        q.abs_().add_(0.1).mul_(1e15)
        k[:, :, hidden] = -1e25
    got = results(flash, q, k, v, do, scale=1e-15, **TINY_BLOCKS)
    want = results(naive_attention, q, k, v, do, scale=1e-15)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.v2_interpreted
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("nq", "nk", "head_dim"),
    # Rows of 24 numbers are at multiples of 16 bytes, where V2 reads by tensor maps.
    [(45, 41, 24), (45, 64, 23), (64, 45, 24), (75, 41, 23)],
)
def test_nothing_beyond_the_inputs_is_read(flash, device, nq, nk, head_dim, causal):
    """NaN around q, k, v and dO, in every dimension: NaN times zero is NaN (SageAttention#376,
    flash-attention#1745)."""
    if slow(flash, device) and causal == (head_dim == 24):
        pytest.skip(TURNS)
    inputs = make_inputs(1, 1, 1, nq, nk, head_dim, torch.float32, device)
    inputs = [layouts.surrounded(t.detach()).requires_grad_(t.requires_grad) for t in inputs]
    got = results(flash, *inputs, causal=causal, **SMALL_BLOCKS)
    assert_equal_to_naive(got, *inputs, causal=causal)


@pytest.mark.v2_interpreted
@pytest.mark.parametrize("layout", [layouts.packed, layouts.transposed])
@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "dO"])
def test_each_tensor_is_read_and_written_at_its_own_strides(
    flash, device, which, layout, monkeypatch
):
    """One of q, k, v and dO has other strides than the rest: V taken at K's (FlagGems#5896), dO at
    o's (flash-attention#355, FlagAttention#1), dK or dQ written at the input's
    (flash-attention#818, ROCm/flash-attention#122)."""
    if slow(flash, device) and which % 2 == (layout is layouts.packed):
        pytest.skip(TURNS)
    inputs = make_inputs(2, 2, 2, 20, 25, 24, torch.float32, device)
    odd = inputs[which]
    inputs = list(inputs)
    inputs[which] = layout(odd.detach()).requires_grad_(odd.requires_grad)
    guard = Guard()
    enter_inside(guard, monkeypatch)
    got = results(flash, *inputs, causal=True, **SMALL_BLOCKS)
    assert guard.margins_are_untouched()
    assert_equal_to_naive(got, *inputs, causal=True)


@pytest.mark.v2_interpreted
@pytest.mark.parametrize("longer", [-2, -1, 0, 1], ids="Nk-Nq={}".format)
def test_the_causal_edge_at_the_corner_of_a_tile(flash, device, longer):
    """The diagonal passes the corners of tiles by one key on either side and exactly: where tiles
    that need no mask, or no work, begin (ffpa-attn#300)."""
    inputs = make_inputs(1, 1, 1, 32, 32 + longer, 16, torch.float32, device)
    got = results(flash, *inputs, causal=True, **TINY_BLOCKS)
    assert_equal_to_naive(got, *inputs, causal=True)


@pytest.mark.v2_interpreted
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_nothing_beyond_segment_ids_is_read(flash, device, dtype):
    """Ids in the middle of a larger tensor, where what follows goes on with the last segment."""
    n = 45
    inputs = make_inputs(2, 1, 1, n, n, 16, torch.float32, device)
    ids = torch.tensor([[0] * 20 + [1] * 25, [-1] * 10 + [1] * 35], dtype=dtype, device=device)
    larger = torch.ones(4, n + 40, dtype=dtype, device=device)
    view = larger[1:3, 20 : 20 + n].copy_(ids)
    got = results(flash, *inputs, segment_ids=view, **SMALL_BLOCKS)
    assert_equal_to_naive(got, *inputs, segment_ids=ids)


@pytest.mark.v2_interpreted
@pytest.mark.parametrize(
    ("nq", "nk", "causal", "deterministic"),
    [
        (45, 41, False, False),
        (45, 41, True, True),
        (45, 64, False, False),
        (45, 64, True, True),
        (75, 41, False, True),
        (75, 41, True, False),
    ],
)
def test_scratch_is_written_before_it_is_read_and_never_left(
    flash, device, nq, nk, causal, deterministic, monkeypatch
):
    """o, m, l, dQ and what delta.py makes in memory full of NaN: uninitialised statistics
    (tilelang#2461), rows beyond N read from or written to what lies there (SageAttention#376)."""
    if slow(flash, device) and causal == (nk == 64):
        pytest.skip(TURNS)
    q, k, v, do = make_inputs(1, 2, 2, nq, nk, 24, torch.float32, device)
    guard = Guard()
    enter_inside(guard, monkeypatch)
    got = results(flash, q, k, v, do, causal=causal, deterministic=deterministic, **SMALL_BLOCKS)
    assert len(guard.given) >= 6  # o, m, l, dq, dk, dv
    assert guard.margins_are_untouched()
    assert_equal_to_naive(got, q, k, v, do, causal=causal)


@pytest.mark.parametrize("shape", [(2, 2, 0, 8), (2, 2, 8, 0)], ids=str)
def test_results_of_nothing_are_written(flash, device, shape):
    """No kernel is launched for an empty sequence, and its zeros do not come from fresh memory
    (flash-attention#1159, pytorch#133780)."""
    batch, heads, nq, nk = shape
    q, k, v, do = make_inputs(batch, heads, heads, nq, nk, 16, torch.float32, device)
    torch.use_deterministic_algorithms(True)  # makes uninitialised memory NaN
    try:
        o, m, l = flash(q, k, v, return_stats=True)
        grads = torch.autograd.grad(o, (q, k, v), do)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (m == float("-inf")).all()
    for t in (o, l, *grads):
        assert torch.equal(t, torch.zeros_like(t))


@pytest.mark.v2_interpreted
def test_a_negative_scale_takes_the_maximum_of_the_scaled_scores(flash, device):
    """The maximum before scaling would be the minimum after, and the exponents overflow. Lengths of
    whole tiles: those without a mask scale last."""
    q, k, v, do = make_inputs(1, 1, 1, 32, 32, 16, torch.float32, device)
    with torch.no_grad():
        k.mul_(16.0)
    o, m, _ = flash(q, k, v, scale=-1.0, return_stats=True, **TINY_BLOCKS)
    qd, kd = upcast(q, k)
    torch.testing.assert_close(m.double(), (-qd @ kd.mT).amax(-1), rtol=1e-5, atol=1e-5)
    got = {"o": o.detach()} | dict(
        zip(("dq", "dk", "dv"), torch.autograd.grad(o, (q, k, v), do), strict=True)
    )
    want = results(naive_attention, *upcast(q, k, v, do), scale=-1.0)
    for name in want:
        torch.testing.assert_close(got[name].double(), want[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_each_row_is_one_programs_own(device, causal):
    """Programs that share a head would otherwise meet in one row: a race on a GPU, another order of
    K/V blocks through the interpreter. So the split does not change a bit."""
    q, k, v, _ = make_inputs(1, 1, 1, 48, 45, 16, torch.float32, device)
    want = None
    for q_splits in (1, 2, 3, 100):
        got = flash_attention_v1(
            q, k, v, causal=causal, return_stats=True, q_splits=q_splits, **TINY_BLOCKS
        )
        want = want or got
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@pytest.mark.v2_interpreted
@HALF
def test_o_is_summed_in_float32_over_many_key_blocks(flash, device, dtype):
    """The first 16 keys weigh 64 times as much as the later ones, whose values are larger by so
    little that an o in half precision would not move at all (ring-flash-attention#42)."""
    step, later = torch.finfo(dtype).eps, 24
    q = torch.ones(1, 1, 16, 16, dtype=dtype, device=device)
    k = torch.zeros(1, 1, 16 * (1 + later), 16, dtype=dtype, device=device)
    v = torch.full_like(k, 1.0 + 31 * step)
    k[:, :, :16, 0] = 6.0  # 2^6
    v[:, :, :16] = 1.0
    o = flash(q, k, v, scale=math.log(2.0), **TINY_BLOCKS)
    want = 1.0 + 31 * step * later / (64 + later)
    assert ((o.double() - want).abs() <= step).all()


@pytest.mark.v2_interpreted
@HALF
def test_dq_is_summed_in_float32_over_many_key_blocks(flash, device, dtype):
    """All weights are 1/Nk. The first 16 keys add to dQ so much that what each later block takes
    off would be lost in half precision, though together it is 8 of its steps."""
    if slow(flash, device) and dtype == torch.bfloat16:
        pytest.skip("the interpreter is given float32")
    blocks, loud = 24, 0.125 / torch.finfo(dtype).eps
    n = 16 * blocks
    q, k, v, do = (
        torch.zeros(1, 1, rows, 16, dtype=dtype, device=device) for rows in (16, n, n, 16)
    )
    k[..., 0] = 1.0
    k[:, :, :16, 0] = loud
    v[:, :, :16, 0] = do[..., 0] = 1.0
    dq = results(
        flash,
        *(t.requires_grad_() for t in (q, k, v)),
        do,
        deterministic=True,
        **TINY_BLOCKS,
    )["dq"]
    # dP is 1 at the first 16 keys and 0 at the others, D_i = 1/blocks, the scale is 1/4.
    want = 0.25 * (loud - 1.0) * (1.0 - 1.0 / blocks) / blocks
    assert ((dq[..., 0].double() / want - 1.0).abs() <= 2 * torch.finfo(dtype).eps).all()


@HALF
def test_dk_and_dv_are_summed_in_float32_over_many_row_blocks(flash, device, dtype, interpreted):
    if interpreted:
        pytest.skip("the kernel sums them in registers")
    inputs = make_inputs(1, 1, 1, 1024, 16, 16, dtype, device)
    assert_as_exact_as_naive(lambda q, k, v: flash(q, k, v, **TINY_BLOCKS), *inputs)


def test_dropout_is_as_exact_as_float64_is(flash, device, interpreted):
    """With equal scores a row is the mean of what is kept, over 1 - p."""
    if device.type == "cuda":
        pytest.skip("float64 runs the tiles on CUDA; covered on the CPU")
    n, p = 40, 0.25
    q, k, v, _ = make_inputs(1, 1, 1, n, n, 16, torch.float64, device)
    torch.manual_seed(5)
    keep = dropout.keep_mask(
        dropout.draw_seed(device), p, torch.tensor(0), torch.arange(n)[:, None], 0, n
    )
    torch.manual_seed(5)
    o = flash(q, k, v, scale=0.0, dropout_p=p, **SMALL_BLOCKS)
    tolerance = 1e-6 if interpreted else 1e-13  # Triton takes 1/(1-p) as a float32
    torch.testing.assert_close(o, keep.double() @ v / n / (1 - p), rtol=tolerance, atol=tolerance)


@pytest.mark.v2_interpreted
def test_every_batch_entry_and_head_drops_its_own_entries(flash, device):
    q, k, v, _ = make_inputs(1, 1, 1, 40, 40, 16, torch.float32, device)
    o = flash(*(t.expand(2, 3, 40, 16) for t in (q, k, v)), dropout_p=0.3)
    heads = list(o.detach().flatten(0, 1))
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(heads, 2))


@pytest.mark.parametrize("layout", [layouts.contiguous, layouts.packed])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_fake_gradients_have_the_strides_of_real_ones(flash, device, dtype, layout):
    """A compiled graph believes the fake ones (ComfyUI#15044)."""
    *qkv, do = make_inputs(1, 2, 1, 20, 25, 16, dtype, device)
    q, k, v, do = (layout(t.detach()) for t in (*qkv, do))
    o, m, l = flash(q, k, v, return_stats=True)
    m = m / math.log(2.0)  # the op's own are in base 2
    arguments = (do, q, k, v, o, m, l, None, None, False, 0.25, 0.0, True, None, None, None)
    opcheck(flash.backward_op, arguments, test_utils="test_faketensor")


def test_compile_does_not_start_again_for_every_length(flash):
    """The second length makes the graph one for all (Liger-Kernel#146)."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, backend=backend)
    def attention(q, k, v):
        return flash(q, k, v, causal=True)

    for n in (40, 51, 62, 73):
        q, k, v, _ = make_inputs(1, 2, 1, n, n, 16, torch.float32, torch.device("cpu"))
        torch.testing.assert_close(attention(q, k, v), naive_attention(q, k, v, causal=True))
    assert len(graphs) <= 2


@pytest.mark.gpu
def test_no_kernel_is_compiled_again_for_another_length(flash, monkeypatch):
    """Lengths are arguments and not constants of the kernels (Liger-Kernel#146). None of these is
    a multiple of 16, of which Triton makes a kernel of its own."""
    triton = pytest.importorskip("triton")
    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime,
        "jit_post_compile_hook",
        lambda *, fn, **_: compiled.append(fn.name),
    )

    fixed = dict(q_splits=2) if flash.splits else {}

    def run(n: int) -> None:
        inputs = make_inputs(1, 2, 2, n, n + 1, 64, torch.float16, torch.device("cuda"))
        results(flash, *inputs, causal=True, **fixed)

    run(301)
    compiled.clear()
    for n in (317, 341, 370):
        run(n)
    assert not compiled


@pytest.mark.gpu
def test_a_fresh_thread_may_run_forward_and_backward(flash):
    """A thread that has not touched CUDA has no context yet (pytorch#124565)."""
    q, k, v, do = make_inputs(1, 2, 2, 100, 100, 64, torch.float32, torch.device("cuda"))
    done = {}

    def run() -> None:
        done.update(results(flash, q, k, v, do, causal=True))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert_equal_to_naive(done, q, k, v, do, causal=True)
