"""Whether an attention backend is right, where standard attention in float64 would not fit."""

from collections.abc import Callable

import torch
from torch import Tensor

from flash_attention import naive_attention

ROWS = 128  # of the first, of the middle and of the last
FACTORS = {"o": 2, "dq": 3, "dk": 3, "dv": 3}


def is_right(
    attention: Callable, q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool
) -> bool:
    """o, and the gradients of some of its rows, of the first and the last head, beside float64.

    attention(q, k, v, causal) -> o, all ``[B, H, N, D]`` of numbers about 1; q, k and v require
    gradients. It may be twice as wrong as standard attention in the same dtype, a gradient three
    times, and by one unit in the last place of the largest value, in float32 by ten. (The tests,
    with smaller inputs, are stricter.) dO is zero but in the rows that are looked at: no others add
    to dK and dV.
    """
    batch, heads, n, _ = q.shape
    rows = rows_checked(n)
    picked = torch.cat([torch.arange(n, device=q.device)[part] for part in rows])
    places = sorted({(0, 0), (batch - 1, heads - 1)})
    some = torch.zeros_like(do)
    for b, h in places:
        some[b, h, picked] = do[b, h, picked]
    o = attention(q, k, v, causal)
    grads = torch.autograd.grad(o, (q, k, v), some)
    got = dict(zip(FACTORS, (o.detach(), *grads), strict=True))
    least = 1.0 if len(rows) == 1 else 0.0  # of few keys, dS may be a difference of equal numbers
    for b, h in places:
        head = [t.detach()[b, h][None, None] for t in (q, k, v, do)]
        own = reference(*head, rows, causal)
        exact = reference(*(t.double() for t in head), rows, causal)
        for name, factor in FACTORS.items():
            result = got[name][b, h].double()
            if name == "o":
                result = result[picked]
            # In float32 the luck of standard attention's last bits decides.
            units = 10 if q.dtype == torch.float32 else 1
            size = max(exact[name].abs().max().item(), least)
            bound = factor * (own[name] - exact[name]).abs().max().item()
            bound += units * torch.finfo(q.dtype).eps * size
            if not (result - exact[name]).abs().max().item() <= bound:  # NaN is not
                return False
    return True


def rows_checked(n: int) -> list[slice]:
    """The first, the middle and the last of n rows; all of them, if they are few."""
    if n <= 3 * ROWS:
        return [slice(0, n)]
    return [slice(first, first + ROWS) for first in (0, (n - ROWS) // 2, n - ROWS)]


def reference(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, rows: list[slice], causal: bool
) -> dict[str, Tensor]:
    """Standard attention of one head ``[1, 1, N, D]``, for these rows: o ``[R, D]`` and what they
    give dq, dk and dv ``[N, D]``, summed in float64."""
    dq, dk, dv = (torch.zeros_like(t[0, 0], dtype=torch.float64) for t in (q, k, v))
    outputs = []
    for part in rows:
        # The causal mask is aligned bottom-right: rows up to ``stop`` see the keys up to it.
        keys = slice(0, part.stop if causal else k.shape[2])
        leaves = [t[:, :, at].requires_grad_() for t, at in ((q, part), (k, keys), (v, keys))]
        o = naive_attention(*leaves, causal=causal)
        outputs.append(o.detach()[0, 0].double())
        grads = torch.autograd.grad(o, leaves, do[:, :, part])
        for total, at, grad in zip((dq, dk, dv), (part, keys, keys), grads, strict=True):
            total[at] += grad[0, 0]
    return {"o": torch.cat(outputs), "dq": dq, "dk": dk, "dv": dv}
