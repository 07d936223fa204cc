"""Each version of FlashAttention on cases that nobody picked: hypothesis draws shapes, strides and
options."""

from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_attention import dropout, naive_attention
from tests.flash_attention import layouts
from tests.flash_attention.parity import assert_within_bound, make_inputs, results, upcast
from tests.flash_attention.versions import V2

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Reach:
    """How many cases an execution affords, and how large."""

    examples: int
    heads: int  # at most so many batch entries, K/V heads, and query heads of one K/V head
    length: int
    head_dims: tuple[int, ...]
    blocks: tuple[int | None, ...]


TILES = Reach(100, 2, 100, tuple(range(1, 257)), (None, 16, 32, 64, 128, 256))
INTERPRETER = Reach(30, 2, 40, (1, 2, 3, 7, 8, 15, 16, 17, 24, 32, 33), (16, 32))
CUDA = Reach(16, 3, 700, (1, 24, 64, 80, 128, 256), (None, 16, 32, 64))  # each may compile anew


@dataclass(frozen=True)
class Case:
    """One call and its gradients, as hypothesis prints it when it fails."""

    batch: int
    heads: int
    kv_heads: int
    nq: int
    nk: int
    head_dim: int
    dtype: torch.dtype
    strides: tuple[str, str, str, str]  # layouts of q, k, v and dO
    segments: str | None
    segment_dtype: torch.dtype
    function: dict  # causal, scale, dropout_p
    knobs: dict
    seed: int

    def inputs(self, device: torch.device) -> list[Tensor]:
        """q, k, v that require gradients, and dO."""
        made = make_inputs(
            self.batch, self.heads, self.kv_heads, self.nq, self.nk, self.head_dim,
            self.dtype, device, self.seed,
        )  # fmt: skip
        return [
            layouts.ALL[name](t.detach()).requires_grad_(t.requires_grad)
            for name, t in zip(self.strides, made, strict=True)
        ]

    def segment_ids(self, device: torch.device) -> Tensor | None:
        """``[B, N]``, at the strides of a part of a larger tensor."""
        if self.segments is None:
            return None
        generator = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(-3, 4, (self.batch, self.nq), generator=generator)
        if self.segments != "any order":
            ids = ids.sort().values
        if self.segments == "one row for all":
            return ids[:1].to(device, self.segment_dtype).expand_as(ids)
        larger = torch.full((self.nq + 2, self.batch + 2), 99, dtype=self.segment_dtype)
        return larger.to(device)[1:-1, 1:-1].t().copy_(ids)

    def keep(self, device: torch.device) -> Tensor | None:
        """The entries of P that dropout keeps, ``[B, H, Nq, Nk]``."""
        if self.function["dropout_p"] == 0.0:
            return None
        torch.manual_seed(self.seed)
        return dropout.keep_mask(
            dropout.draw_seed(device),
            self.function["dropout_p"],
            torch.arange(self.batch * self.heads, device=device).view(self.batch, -1, 1, 1),
            torch.arange(self.nq, device=device)[:, None],
            0,
            self.nk,
        )


@st.composite
def cases(draw, reach: Reach, splits: bool) -> Case:
    few = st.integers(1, reach.heads)
    kv_heads = draw(few)
    lengths = st.integers(0, 3) | st.integers(1, reach.length)
    nq = draw(lengths)
    nk = draw(st.just(nq) | lengths)
    segments = st.none()
    if nq == nk:
        segments |= st.sampled_from(["packed", "any order", "one row for all"])
    return Case(
        batch=draw(few),
        heads=kv_heads * draw(few),
        kv_heads=kv_heads,
        nq=nq,
        nk=nk,
        head_dim=draw(st.sampled_from(reach.head_dims)),
        dtype=draw(st.sampled_from(DTYPES)),
        strides=tuple(draw(st.sampled_from(list(layouts.ALL))) for _ in range(4)),
        segments=draw(segments),
        segment_dtype=draw(st.sampled_from([torch.int64, torch.int32])),
        function=dict(
            causal=draw(st.booleans()),
            scale=draw(st.none() | st.just(0.0) | st.floats(0.01, 2.0) | st.floats(-2.0, -0.01)),
            dropout_p=draw(st.just(0) | st.integers(600, 60_000)) / 2**16,  # as p is rounded
        ),
        knobs=dict(
            deterministic=draw(st.booleans()),
            block_q=draw(st.sampled_from(reach.blocks)),
            block_kv=draw(st.sampled_from(reach.blocks)),
            **(dict(q_splits=draw(st.just("auto") | st.integers(1, 9))) if splits else {}),
        ),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@pytest.mark.v2_interpreted
@pytest.mark.timeout(900)
def test_output_and_gradients_match_naive_on_any_case(flash, device, interpreted):
    reach = CUDA if device.type == "cuda" else INTERPRETER if interpreted else TILES
    if flash is V2 and device.type == "cpu":
        reach = replace(reach, examples=reach.examples // 3)
    # Triton takes the scale and 1/(1-p) as float32 also where the interpreter computes in float64.
    eps = {torch.float64: torch.finfo(torch.float32 if interpreted else torch.float64).eps}

    @settings(max_examples=reach.examples, deadline=None, derandomize=True, database=None)
    @given(case=cases(reach, flash.splits))
    def check(case: Case) -> None:
        inputs = case.inputs(device)
        function = dict(case.function, segment_ids=case.segment_ids(device))
        keep = case.keep(device)

        def attention(q, k, v):
            torch.manual_seed(case.seed)
            return flash(q, k, v, **function, **case.knobs)

        def reference(q, k, v, **changes):
            with mock.patch("torch.nn.functional.dropout", lambda p, rate: p * keep / (1 - rate)):
                return naive_attention(q, k, v, **{**function, **changes})

        try:
            got = results(attention, *inputs)
        except ValueError as error:
            if "give smaller blocks" not in str(error):
                raise
            reject()  # the GPU has no room for the blocks drawn
        own = results(reference, *inputs)
        exact = results(reference, *upcast(*inputs))
        floors = rounding(
            reference, *upcast(*inputs), case, eps.get(case.dtype, torch.finfo(torch.float32).eps)
        )
        for name, ref in exact.items():
            assert_within_bound(name, got[name], own[name], ref, floors[name])

    check()


def rounding(
    reference, q: Tensor, k: Tensor, v: Tensor, do: Tensor, case: Case, eps: float
) -> dict[str, float]:
    """What rounding alone may do to each result, in float64.

    The bound of ``parity`` comes from the error of naive attention, which is 0 by luck where there
    is one key or few numbers. To first order, with absolute values everywhere: sums rounded to
    ``eps``, some 32 times on the way, with scores whose error grows with their size; and D_i =
    dO_i o_i from an o rounded to its dtype, which dS has as dP_i - D_i.
    """
    if q.numel() == 0 or k.numel() == 0:
        return dict.fromkeys(("o", "dq", "dk", "dv"), 0.0)
    scale = case.function["scale"]
    scale = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    score = scale * q.norm(dim=-1).max() * k.norm(dim=-1).max()
    sums = 32 * eps * (1 + score)
    o = reference(q, k, v.abs())
    (dv,) = torch.autograd.grad(reference(q, k, v), v, do.abs())
    ds = (do.abs() * o).sum(-1, keepdim=True)  # [B, H, Nq, 1], over P
    dq = ds * reference(q, k, k.abs(), dropout_p=0.0)
    (dk,) = torch.autograd.grad(reference(q, k, v, dropout_p=0.0), v, ds * q.abs())
    rounded_o = torch.finfo(case.dtype).eps
    factors = {"o": sums, "dv": sums, "dq": scale * (sums + rounded_o)}
    factors["dk"] = factors["dq"]
    return {
        name: (factors[name] * t.max()).item()
        for name, t in (("o", o), ("dq", dq), ("dk", dk), ("dv", dv))
    }
