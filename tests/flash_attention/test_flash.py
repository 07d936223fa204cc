"""Each version of FlashAttention in its three executions: PyTorch tiles, interpreted kernel, CUDA
kernel."""

import itertools

import pytest
import torch
from torch import Tensor

from flash_attention import dropout, flash_attention_v1, naive_attention
from tests.flash_attention import layouts
from tests.flash_attention.parity import (
    assert_as_exact_as_naive,
    assert_within_bound,
    make_inputs,
    results,
    upcast,
)
from tests.flash_attention.versions import V1, V2

HALF = [torch.float16, torch.bfloat16]
DTYPES = [*HALF, torch.float32]
SMALL_BLOCKS = dict(block_q=32, block_kv=32)  # several blocks each way at the interpreter's sizes
INTERPRETED = (1, 40, 64, 111, 256)  # head dims: the smallest, the largest, odd, padded or not


@pytest.mark.v2_on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "head_dim", [1, 16, 32, 40, 48, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256]
)
def test_output_and_gradients_match_naive_at_every_head_dim(
    flash, device, head_dim, causal, dtype, interpreted
):
    if interpreted:
        if head_dim not in INTERPRETED or dtype == torch.bfloat16:
            pytest.skip("covered by the tiles and the GPU; slow through the interpreter")
        # Each head dim with both masks and both dtypes; neighbours take turns with the pairs.
        if (INTERPRETED.index(head_dim) + causal + (dtype == torch.float16)) % 2:
            pytest.skip("the next head dim has this mask with this dtype")
    n = 70 if interpreted else 203
    heads = 1 if interpreted else 2
    inputs = make_inputs(1, heads, heads, n, n, head_dim, dtype, device)
    assert_as_exact_as_naive(flash, *inputs, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("nq", "nk"),
    [
        (1, 239),
        (3, 799),
        (127, 513),
        (113, 203),
        (128, 217),
        (108, 256),
        (256, 512),
        (512, 256),
        (203, 113),
        pytest.param(1023, 1024, marks=pytest.mark.gpu),
        pytest.param(1024, 1023, marks=pytest.mark.gpu),
        pytest.param(2048, 2048, marks=pytest.mark.gpu),
    ],
)
def test_output_and_gradients_match_naive_at_every_length(
    flash, device, nq, nk, causal, interpreted
):
    dtype = torch.float16
    if interpreted and nq * nk > 30_000:
        pytest.skip("slow through the interpreter")
    heads = 1 if interpreted else 2
    inputs = make_inputs(1, heads, heads, nq, nk, 32, dtype, device)
    assert_as_exact_as_naive(flash, *inputs, causal=causal)


@pytest.mark.v2_interpreted
@pytest.mark.v2_on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_output_and_gradients_match_naive_with_grouped_query_heads(
    flash, device, heads, kv_heads, dtype, interpreted
):
    slow = interpreted and flash is V2
    if slow and ((heads, kv_heads) != (6, 2) or dtype != torch.float32):
        pytest.skip("V1 and the GPU have the others")
    if interpreted and (heads, kv_heads) != (6, 2) and dtype != torch.float32:
        pytest.skip("which head is whose has nothing to do with the dtype")
    n, batch = (40, 1) if interpreted else (150, 2)
    inputs = make_inputs(batch, heads, kv_heads, n, n + 9, 16, dtype, device)
    assert_as_exact_as_naive(flash, *inputs, causal=True)


def test_a_last_dimension_of_any_stride(flash, device):
    """Other strides, one tensor at a time, are in test_flash_faults.py."""
    q, k, v, do = make_inputs(1, 2, 1, 35, 41, 24, torch.float32, device)
    want = results(flash, q, k, v, do, causal=True, **SMALL_BLOCKS)
    strided = [
        layouts.strided_last(t.detach()).requires_grad_(t.requires_grad) for t in (q, k, v, do)
    ]
    got = results(flash, *strided, causal=True, **SMALL_BLOCKS)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-5)


def test_expanded_do(flash, device):
    q, k, v, _ = make_inputs(2, 2, 2, 40, 40, 16, torch.float32, device)
    for do in (
        torch.ones((), device=device).expand(2, 2, 40, 16),
        torch.randn(1, 1, 40, 16, device=device).expand(2, 2, 40, 16),
    ):
        assert_as_exact_as_naive(flash, q, k, v, do, causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2)])
def test_gradients_pass_gradcheck_in_float64(flash, device, causal, heads, kv_heads, interpreted):
    if device.type == "cuda":
        pytest.skip("float64 runs the tiles on CUDA; covered on the CPU")
    if interpreted and causal != (heads > 1):
        pytest.skip("covered by the tiles, and against naive attention below")
    q, k, v, _ = make_inputs(1, heads, kv_heads, 7, 9, 4, torch.float64, device)

    def attention(q, k, v):
        return flash(q, k, v, causal=causal, scale=0.5, block_q=16, block_kv=16)

    assert torch.autograd.gradcheck(attention, (q, k, v), fast_mode=device.type == "cpu")


@pytest.mark.parametrize("causal", [False, True])
def test_float64_equals_naive_over_many_blocks(flash, device, causal, interpreted):
    q, k, v, do = make_inputs(1, 2, 1, 75, 70, 16, torch.float64, device)
    got = results(flash, q, k, v, do, causal=causal, **SMALL_BLOCKS)
    want = results(naive_attention, q, k, v, do, causal=causal)
    for name in want:
        tolerance = 1e-6 if interpreted else 1e-12  # Triton takes the scale as a float32
        torch.testing.assert_close(got[name], want[name], rtol=tolerance, atol=tolerance)


@pytest.mark.v2_interpreted
def test_rows_that_see_no_key_give_zero_output_zero_gradient_and_empty_statistics(flash, device):
    q, k, v, do = make_inputs(1, 2, 2, 50, 20, 16, torch.float32, device)  # rows 0 to 29 are blind
    o, m, l = flash(q, k, v, causal=True, return_stats=True, **SMALL_BLOCKS)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), do)
    assert torch.equal(o[:, :, :30], torch.zeros_like(o[:, :, :30]))
    assert torch.equal(dq[:, :, :30], torch.zeros_like(dq[:, :, :30]))
    assert (m[:, :, :30] == float("-inf")).all()
    assert (l[:, :, :30] == 0).all()
    assert all(t.isfinite().all() for t in (o, dq, dk, dv))
    # What the blind rows' dO holds must not reach a gradient; row 29 shares a tile with row 30.
    for loud in (1e6, torch.inf, torch.nan):
        do[:, :, :30] = loud
        again = torch.autograd.grad(flash(q, k, v, causal=True, **SMALL_BLOCKS), (q, k, v), do)
        for before, after in zip((dq, dk, dv), again, strict=True):
            torch.testing.assert_close(after, before)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32], ids=str
)
def test_segment_ids_of_every_integer_dtype(flash, device, dtype):
    inputs = make_inputs(1, 1, 1, 40, 40, 16, torch.float32, device)
    ids = (torch.arange(40, device=device) >= 18)[None]
    got = results(flash, *inputs, segment_ids=ids.to(dtype), **SMALL_BLOCKS)
    want = results(naive_attention, *inputs, segment_ids=ids.long())
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.v2_interpreted
def test_statistics_are_the_row_maximum_and_the_row_sum(flash, device):
    q, k, v, _ = make_inputs(2, 4, 2, 40, 55, 16, torch.float32, device)
    _, m, l = flash(q, k, v, causal=True, return_stats=True, **SMALL_BLOCKS)
    qd, kd = upcast(q, k)
    s = qd @ kd.repeat_interleave(2, dim=1).transpose(-1, -2) / 4.0
    s = s.masked_fill(~torch.ones(40, 55, dtype=torch.bool, device=device).tril(15), float("-inf"))
    want_m = s.amax(-1)
    torch.testing.assert_close(m.double(), want_m, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        l.double(), (s - want_m[..., None]).exp().sum(-1), rtol=1e-5, atol=1e-5
    )
    assert m.dtype == l.dtype == torch.float32


def test_scale_zero_is_taken_as_given(flash, device):
    q, k, v, _ = make_inputs(1, 1, 1, 20, 30, 16, torch.float32, device)
    o = flash(q, k, v, scale=0.0)
    torch.testing.assert_close(o, v.mean(dim=2, keepdim=True).expand_as(o))


@pytest.mark.parametrize("scale", [-0.7, 0.5])
def test_output_and_gradients_match_naive_at_any_scale(flash, device, scale):
    inputs = make_inputs(1, 2, 2, 40, 40, 16, torch.float32, device)
    assert_as_exact_as_naive(flash, *inputs, scale=scale, causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_loud_key_takes_all_the_weight(flash, device, dtype):
    q, k, v, _ = make_inputs(1, 1, 1, 33, 50, 16, dtype, device)
    with torch.no_grad():
        q.fill_(8.0)
        k.fill_(-8.0)
        k[:, :, 37] = 8.0
    o = flash(q, k, v, scale=1.0, **SMALL_BLOCKS)
    torch.testing.assert_close(o, v[:, :, 37:38].expand_as(o))


def test_padding_keys_do_not_win_against_very_negative_scores(flash, device):
    q, k, v, do = make_inputs(1, 1, 1, 35, 37, 16, torch.float32, device)
    with torch.no_grad():
        q.copy_(q.abs() + 3)
        k.copy_(-(k.abs() + 3))  # every score is far below 0, the score of a padding key
    got = results(flash, q, k, v, do)
    want = results(naive_attention, *upcast(q, k, v, do))
    for name in want:  # a padding key that won would be wrong by the whole value
        torch.testing.assert_close(got[name].double(), want[name], rtol=1e-3, atol=1e-3)


def test_a_single_key_gives_its_value_and_no_gradient_to_q_and_k(flash, device):
    q, k, v, do = make_inputs(1, 2, 2, 1, 1, 32, torch.float32, device)
    got = results(flash, q, k, v, do, causal=True)
    torch.testing.assert_close(got["o"], v.detach())
    torch.testing.assert_close(got["dv"], do)
    for name in ("dq", "dk"):
        torch.testing.assert_close(got[name], torch.zeros_like(do), rtol=0, atol=1e-5)


def test_a_nan_in_k_reaches_every_gradient_that_it_reaches_in_naive(flash, device):
    q, k, v, do = make_inputs(1, 1, 1, 40, 40, 16, torch.float32, device)
    with torch.no_grad():
        k[0, 0, 5, 3] = float("nan")
    got = results(flash, q, k, v, do, causal=True, **SMALL_BLOCKS)
    want = results(naive_attention, q, k, v, do, causal=True)
    for name in want:
        assert torch.equal(got[name].isnan(), want[name].isnan()), name


def test_keys_all_equal_give_the_mean_of_v(flash, device):
    q, k, v, _ = make_inputs(1, 2, 2, 30, 70, 32, torch.float32, device)
    o = flash(torch.ones_like(q), torch.ones_like(k), v, **SMALL_BLOCKS)
    torch.testing.assert_close(o, v.mean(dim=2, keepdim=True).expand_as(o))


@pytest.mark.parametrize("shape", [(0, 2, 8, 8), (2, 2, 0, 8), (2, 2, 8, 0), (2, 2, 0, 0)], ids=str)
def test_nothing_to_attend_gives_zeros(flash, device, shape):
    batch, heads, nq, nk = shape
    q, k, v, do = make_inputs(batch, heads, heads, nq, nk, 16, torch.float32, device)
    o, m, l = flash(q, k, v, return_stats=True)
    grads = torch.autograd.grad(o, (q, k, v), do)
    assert torch.equal(o, torch.zeros_like(q))
    assert (m == float("-inf")).all()
    assert (l == 0).all()
    for grad, t in zip(grads, (q, k, v), strict=True):
        assert torch.equal(grad, torch.zeros_like(t))


@pytest.mark.parametrize("q_splits", [1, 2, 3, 100])
def test_splitting_the_work_changes_nothing_but_rounding(device, q_splits):
    q, k, v, do = make_inputs(1, 2, 1, 70, 60, 16, torch.float32, device)
    want = results(naive_attention, *upcast(q, k, v, do), causal=True)
    got = results(flash_attention_v1, q, k, v, do, causal=True, q_splits=q_splits, **SMALL_BLOCKS)
    for name in want:
        torch.testing.assert_close(got[name].double(), want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("block_q", "block_kv"), [(16, 16), (16, 64), (64, 16), (64, 64)])
def test_block_sizes_change_nothing_but_rounding(flash, device, block_q, block_kv):
    inputs = make_inputs(1, 1, 1, 70, 75, 16, torch.float32, device)
    assert_as_exact_as_naive(
        lambda q, k, v, causal: flash(q, k, v, causal=causal, block_q=block_q, block_kv=block_kv),
        *inputs,
        causal=True,
    )


@pytest.mark.v2_interpreted
@pytest.mark.parametrize(
    ("lengths", "causal"),
    [((13, 40, 1, 26), True), ((5, 60, 35), False), ((5, 60, 35), True)],  # short, and long
    ids=str,
)
def test_segments_equal_separate_documents(flash, device, lengths, causal):
    n = sum(lengths)
    segment_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    q, k, v, do = make_inputs(2, 1, 1, n, n, 16, torch.float32, device)
    packed = segment_ids.to(device).expand(2, n)  # stride 0 over the batch
    options = dict(causal=causal, segment_ids=packed, **SMALL_BLOCKS)
    got = results(flash, q, k, v, do, **options)
    apart = [
        results(naive_attention, *(t[:, :, a:b] for t in upcast(q, k, v, do)), causal=causal)
        for a, b in itertools.pairwise([0, *itertools.accumulate(lengths)])
    ]
    for name in got:
        want = torch.cat([document[name] for document in apart], dim=2)
        torch.testing.assert_close(got[name].double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_segment_ids_in_any_order_match_naive(flash, device, causal):
    inputs = make_inputs(2, 2, 1, 45, 45, 16, torch.float32, device)
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randint(-2, 3, (45,), generator=generator), torch.arange(45) // 12])
    options = dict(causal=causal, segment_ids=ids.to(device))
    assert_as_exact_as_naive(
        lambda q, k, v, **o: flash(q, k, v, **o, **SMALL_BLOCKS),
        *inputs,
        reference=naive_attention,
        **options,
    )


@pytest.mark.v2_interpreted
@pytest.mark.parametrize("causal", [False, True])
def test_whole_blocks_of_other_segments_are_skipped(flash, device, causal):
    """What is not looked at cannot spread: NaN in a document of whole blocks stays there."""
    q, k, v, do = make_inputs(1, 2, 1, 160, 160, 16, torch.float32, device)
    ids = torch.tensor([0] * 64 + [1] * 32 + [2] * 64, device=device)[None]
    alien = (ids == 1)[0]
    with torch.no_grad():
        for t in (q, k, v, do):
            t[:, :, alien] = float("nan")
    got = results(flash, q, k, v, do, causal=causal, segment_ids=ids, **SMALL_BLOCKS)
    for name, t in got.items():
        assert t[:, :, alien].isnan().all(), name
        assert t[:, :, ~alien].isfinite().all(), name


def _naive_with_mask(q, k, v, *, keep: Tensor, dropout_p: float) -> Tensor:
    s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    n, m = s.shape[-2:]
    s = s.masked_fill(~torch.ones(n, m, dtype=torch.bool, device=s.device).tril(), float("-inf"))
    p = torch.softmax(s.float() if s.dtype != torch.float64 else s, dim=-1)
    return (p * keep / (1 - dropout_p)).to(v.dtype) @ v


@pytest.mark.v2_interpreted
@pytest.mark.parametrize(
    ("dtype", "deterministic"), [(torch.float16, True), (torch.float32, False)], ids=str
)
def test_dropout_drops_the_same_entries_in_forward_and_backward(
    flash, device, dtype, deterministic
):
    n = 40
    q, k, v, do = make_inputs(1, 2, 2, n, n, 16, dtype, device)
    torch.manual_seed(5)
    seed = dropout.draw_seed(device)
    keep = dropout.keep_mask(
        seed,
        0.25,
        torch.arange(2, device=device).view(1, 2, 1, 1),
        torch.arange(n, device=device)[:, None],
        0,
        n,
    )

    def attention(q, k, v, **_):
        torch.manual_seed(5)
        options = dict(dropout_p=0.25, deterministic=deterministic, **SMALL_BLOCKS)
        return flash(q, k, v, causal=True, **options)

    def reference(q, k, v, **_):
        return _naive_with_mask(q, k, v, keep=keep, dropout_p=0.25)

    assert_as_exact_as_naive(attention, q, k, v, do, reference=reference)


def test_dropout_probability_zero_is_bitwise_no_dropout(flash, device):
    q, k, v, do = make_inputs(1, 2, 2, 40, 40, 16, torch.float32, device)
    want = results(flash, q, k, v, do, deterministic=True)
    got = results(flash, q, k, v, do, dropout_p=0.0, deterministic=True)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_new_call_drops_other_entries(flash, device):
    q, k, v, _ = make_inputs(1, 1, 1, 40, 40, 16, torch.float32, device)
    first = flash(q, k, v, dropout_p=0.5)
    assert not torch.equal(first, flash(q, k, v, dropout_p=0.5))


def test_deterministic_gradients_repeat_bit_for_bit(flash, device):
    n, heads = (1000, 4) if device.type == "cuda" else (70, 2)
    q, k, v, do = make_inputs(1, heads, heads // 2, n, n, 16, torch.float32, device)
    options = dict(causal=True, **SMALL_BLOCKS)
    want = results(flash, q, k, v, do, deterministic=True, **options)
    for _ in range(50 if device.type == "cuda" else 1):
        # V2's repeat without being told to.
        got = results(flash, q, k, v, do, deterministic=flash is V1, **options)
        assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_no_race_shows_in_a_full_gpu(flash, head_dim, deterministic):
    """The tuned blocks at full load: a store that a later load could overtake would show here. Only
    the order in which V1 sums dQ may differ, unless it is deterministic."""
    if flash is V2 and deterministic:
        pytest.skip("V2 always is")
    device = torch.device("cuda")
    q, k, v, do = make_inputs(4, 40, 40, 1000, 1000, head_dim, torch.bfloat16, device)
    options = dict(causal=True, deterministic=deterministic, return_stats=True)
    want = first_dq = None
    for i in range(250):
        # Scratch from memory full of NaN: nothing may be read before it is written.
        torch.full((4, 40, 1000, 3 * head_dim), float("nan"), device=device)
        o, m, l = flash(q, k, v, **options)
        got = [o, m, l]
        if i % 10 == 0:  # where V1 is deterministic, one program a head adds to dQ: slow
            dq, dk, dv = torch.autograd.grad(o, (q, k, v), do)
            got += [dk, dv]
            first_dq = dq if first_dq is None else first_dq
            difference = (dq.double() - first_dq.double()).abs().max()
            assert difference <= (0.02 if flash is V1 and not deterministic else 0.0)
        want = want or got
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=False))


def test_backward_twice_with_retain_graph_gives_the_same(flash, device):
    q, k, v, do = make_inputs(1, 2, 2, 40, 40, 16, torch.float32, device)
    o = flash(q, k, v, causal=True, deterministic=True)
    first = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
    second = torch.autograd.grad(o, (q, k, v), do)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3))[1:], ids=str)
def test_any_subset_of_inputs_may_require_gradients(flash, device, wanted):
    inputs = make_inputs(1, 1, 1, 20, 20, 16, torch.float32, device)
    full = results(flash, *inputs, causal=True, deterministic=True)
    *qkv, do = inputs
    qkv = [t.detach().requires_grad_(w) for t, w in zip(qkv, wanted, strict=True)]
    flash(*qkv, causal=True, deterministic=True).backward(do)
    for t, w, name in zip(qkv, wanted, ("dq", "dk", "dv"), strict=True):
        assert (t.grad is None) != w
        if w:
            assert torch.equal(t.grad, full[name])


def test_double_backward_is_refused(flash, device):
    q, k, v, do = make_inputs(1, 1, 1, 8, 8, 16, torch.float32, device)
    o = flash(q, k, v)
    (dq,) = torch.autograd.grad(o, q, do, create_graph=True)
    with pytest.raises(RuntimeError, match="no double backward"):
        dq.sum().backward()


@pytest.mark.parametrize("wanted", ["q", "k"])
def test_a_gradient_into_the_statistics_is_refused(flash, device, wanted):
    q, k, v, _ = make_inputs(1, 1, 1, 8, 8, 16, torch.float32, device)
    q.requires_grad_(wanted == "q")
    k.requires_grad_(wanted == "k")
    v.requires_grad_(False)
    o, m, _ = flash(q, k, v, return_stats=True)
    with pytest.raises(RuntimeError, match="no gradient for the statistics"):
        (o.sum() + m.sum()).backward()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_kept_for_backward_is_q_k_v_o_and_two_numbers_a_row(flash, device, dtype):
    def kept(n: int) -> int:
        q, k, v, _ = make_inputs(1, 2, 1, n, n, 16, dtype, device)
        storages = {}

        def pack(t: Tensor) -> Tensor:
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            o = flash(q, k, v, causal=True)
        assert o.requires_grad
        return sum(storages.values())

    size = torch.empty((), dtype=dtype).element_size()
    for n in (64, 128):
        assert kept(n) == n * (16 * (2 + 2 + 1 + 1) * size + 2 * 2 * 4)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_autocast_decides_the_dtype(flash, device, dtype):
    q, k, v, _ = make_inputs(1, 2, 2, 20, 20, 16, torch.float32, device)
    with torch.autocast(device.type, dtype=dtype):
        o = flash(q, k.to(dtype), v)
    assert o.dtype == dtype
    want = naive_attention(*(t.to(dtype) for t in (q, k, v)))
    exact = naive_attention(*upcast(q, k, v))
    assert_within_bound("o", o, want, exact)
