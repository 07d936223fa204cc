"""The attention implementations of others that the benchmark sets beside ours, where they import.

Each is f(q, k, v, causal) -> o with q, k, v ``[B, H, N, D]`` of one length.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def peers(device: torch.device) -> dict[str, Callable]:
    """Name -> implementation, for those that can run on this device."""
    found: dict[str, Callable] = {"sdpa": partial(_sdpa, None)}
    if device.type != "cuda":
        return found
    for name, backend in (
        ("sdpa_flash", SDPBackend.FLASH_ATTENTION),
        ("sdpa_cudnn", SDPBackend.CUDNN_ATTENTION),
        ("sdpa_efficient", SDPBackend.EFFICIENT_ATTENTION),
    ):
        found[name] = partial(_sdpa, backend)
    found["flex"] = _flex
    for name, module in (("fa3", "flash_attn_interface"), ("fa4", "flash_attn.cute")):
        try:
            found[name] = partial(_flash_attn, __import__(module, fromlist=["x"]).flash_attn_func)
        except (ImportError, AttributeError):
            continue
    return found


def _sdpa(backend: SDPBackend | None, q, k, v, causal: bool):
    if backend is None:  # PyTorch's choice
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _flash_attn(function: Callable, q, k, v, causal: bool):
    out = function(*(t.transpose(1, 2) for t in (q, k, v)), causal=causal)  # [B, N, H, D]
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def _flex(q, k, v, causal: bool):
    mask = _causal_blocks(q.shape[2], q.device) if causal else None
    return _compiled_flex(tuple(q.shape))(q, k, v, block_mask=mask)


@cache
def _compiled_flex(shape: tuple[int, ...]) -> Callable:
    """FlexAttention compiled for one shape, so that it never falls back to its eager form, which
    keeps the scores, as one function compiled for many shapes does after eight of them."""
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


@cache
def _causal_blocks(n: int, device: torch.device):
    from torch.nn.attention.flex_attention import create_block_mask

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    return create_block_mask(causal, None, None, n, n, device=device)
