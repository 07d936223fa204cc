"""Elements further than 2^31 from a tensor's first: every index times a stride is 64 bits wide."""

import gc

import psutil
import pytest
import torch
from torch import Tensor

from flash_attention import naive_attention
from tests.flash_attention.parity import assert_within_bound, make_inputs, results, upcast

pytestmark = pytest.mark.alone

FAR = 2**31
# The dimension that is spread, and B, H, Hkv: at least 3 of it, so that its stride fits in 32 bits
# where its last index times the stride does not.
CASES = {
    "batch": (0, (3, 2, 1)),
    "head": (1, (1, 6, 3)),
    "row": (2, (1, 2, 1)),
    "column": (3, (1, 2, 1)),
}


def need_gib(gib: int, device: torch.device) -> None:
    if device.type == "cuda":
        held = torch.cuda.get_device_properties(device).total_memory
    else:
        held = psutil.virtual_memory().total
    if held < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of memory; the device has {held / 2**30:.0f}")


@pytest.fixture(autouse=True)
def memory_given_back():
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def spread(t: Tensor, big: Tensor, dim: int, at: int) -> Tensor:
    """t's numbers in a view of ``big`` from element ``at`` on: contiguous but for dimension
    ``dim``, whose last index lies more than 2^31 elements from its first."""
    sizes = list(t.shape)
    strides = [0] * 4
    step = 1
    for d in (3, 2, 1, 0):
        if d != dim:
            strides[d] = step
            step *= sizes[d]
    strides[dim] = FAR // (sizes[dim] - 1) + 1
    assert strides[dim] > step * 4  # the four tensors lie side by side between two of its indices
    view = big.as_strided(sizes, strides, at)
    view.copy_(t)
    return view


@pytest.mark.v2_on_gpu
@pytest.mark.parametrize("case", CASES)
def test_inputs_with_strides_past_int32_equal_contiguous_copies(flash, case, device, interpreted):
    need_gib(12, device)
    dim, heads = CASES[case]
    n = 9 if interpreted else 80
    inputs = make_inputs(*heads, n, n, 16, torch.float16, device)
    # Room on both sides: an offset that wraps around reads a wrong number, not foreign memory.
    big = torch.empty(2 * FAR + 2**28, dtype=torch.float16, device=device)
    if device.type == "cuda":  # a CPU has no memory behind what is never touched
        big.fill_(float("nan"))
    views = []
    for i, t in enumerate(inputs):
        view = spread(t.detach(), big, dim, at=FAR + i * 2**16)
        views.append(view.detach().requires_grad_(t.requires_grad))
    options = dict(causal=True, deterministic=True)
    want = results(flash, *inputs, **options)
    got = results(flash, *views, **options)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-2, atol=1e-3)


# B, H, N, D of outputs that pass 2^31 elements, by the index that carries them there.
OUTPUTS = {
    "batch": (2**14, 32, 80, 64),
    "head and row": (1, 2**19, 80, 64),  # laid out as [B, N, H, D]: a row is 2^25 elements long
    "statistics": (2**12, 2**13, 65, 1),  # m, l and delta pass 2^31 rows
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", OUTPUTS)
def test_outputs_past_int32_are_right_in_their_last_rows(flash, case):
    batch, heads, n, head_dim = OUTPUTS[case]
    assert batch * heads * n * head_dim > FAR
    device = torch.device("cuda")
    need_gib(100, device)
    # 8 different heads, repeated over the rest by stride 0: the inputs cost nothing.
    few = make_inputs(1, 8, 8, n, n, head_dim, torch.bfloat16, device)
    repeats = batch * heads // 8

    def repeated(t: Tensor) -> Tensor:
        """[batch, heads, n, head_dim], where flat head i is head i % 8 of the few."""
        if batch == 1:  # no stride reaches every 8th head of one dimension: a copy is made
            return t.detach().repeat(1, repeats, 1, 1)
        per_batch = t.detach().repeat(1, heads // 8, 1, 1)
        return per_batch.expand(batch, heads, n, head_dim)

    many = [repeated(t).requires_grad_(t.requires_grad) for t in few]
    got = results(flash, *many, causal=True)
    own = results(naive_attention, *few, causal=True)
    exact = results(naive_attention, *upcast(*few), causal=True)
    for name in ("o", "dq", "dk", "dv"):
        result = got.pop(name)
        assert result.shape == (batch, heads, n, head_dim)
        for part in (result[:1, :8], result[-1:, -8:], result[batch // 2, heads // 2 :][None, :8]):
            assert_within_bound(name, part, own[name], exact[name])
        del result
        torch.cuda.empty_cache()
