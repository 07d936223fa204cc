"""For Hugging Face transformers: import this module, then load a model with
``attn_implementation="fa_v2"`` (or ``"fa_v1"``).

The names are not "flash_v1" and "flash_v2" because transformers loads a FlashAttention package for
every name that has "flash" in it, whatever is registered under the name, and fails where it finds
none. Grouped-query heads go to the kernel as they are.

A model that computes attention by itself, whatever it is asked for (BLOOM, XGLM), takes only its
mask from here. It would add that to its scores, so a mask has a type that PyTorch adds to nothing:
such a model ends in PyTorch's error about Float8 in place of a wrong result.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from flash_attention.v1.op import flash_attention_v1
from flash_attention.v2.op import flash_attention_v2

try:
    import transformers
except ImportError as error:
    raise ImportError(
        "flash_attention.transformers needs transformers 5.4 or later; it cannot be imported"
    ) from error

if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 4):
    raise ImportError(
        f"flash_attention.transformers needs transformers 5.4 or later; got "
        f"{transformers.__version__}"
    )

from transformers import AttentionInterface, AttentionMaskInterface  # an old one has neither

# Arguments with which a model asks for another attention than softmax(scale QK^T)V.
REFUSED = (
    "softcap",
    "s_aux",
    "sinks",
    "position_bias",
    "head_mask",
    "indices",
    "block_indices",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "output_attentions",
)


# A mask's type says what kind it is. No arithmetic takes these types.
CAUSAL, BOTH_WAYS = torch.float8_e4m3fn, torch.float8_e5m2


def mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str | None = None,
    **_: object,
) -> Tensor:
    """A model's mask, as ``AttentionMaskInterface`` asks for it, for :func:`attend`.

    attention_mask: bool ``[B, Nk]``, False at padding.

    Returns ``[B, 1, 1, Nk]``, 0 at padding, or ``[1, 1, 1, 1]`` where nothing is padding, of type
    ``CAUSAL`` or ``BOTH_WAYS``: a model's attention need not say which it is, or says the wrong
    one, and eager goes by the mask.

    Raises:
        ValueError: a mask that is neither causal nor of padding alone.
    """
    # transformers says so where a mask may be left to attention's own causal flag.
    if not (allow_is_causal_skip or allow_is_bidirectional_skip):
        raise ValueError(
            "fa_v1 and fa_v2 take causal masks and padding; got another mask (packed position_ids, "
            "a prefix, blocks or a compiled cache)"
        )
    # Of a full sliding cache the first keys are gone: the tokens so far count.
    _check_window(local_size, max(kv_length, q_offset + q_length), allow_is_causal_skip)
    if allow_is_causal_skip and q_offset + q_length != kv_length:
        raise ValueError(
            "fa_v1 and fa_v2 take caches that hold the tokens so far and no more; got "
            f"{kv_length} keys for {q_offset + q_length} tokens (a static cache?)"
        )
    if attention_mask is not None and attention_mask.shape[1] != kv_length:
        raise ValueError(
            f"attention_mask must cover all {kv_length} keys; got {attention_mask.shape[1]}"
        )
    kind = CAUSAL if allow_is_causal_skip else BOTH_WAYS
    if attention_mask is not None and not attention_mask.all():
        return attention_mask[:, None, None].to(kind)
    return torch.ones(1, 1, 1, 1, device=device).to(kind)


def attend(
    function: Callable,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """``function`` (flash_attention_v1 or v2) as ``AttentionInterface`` calls it.

    query ``[B, H, Nq, D]``; key, value ``[B, Hkv, Nk, D]``; attention_mask: what :func:`mask` made,
    or bool ``[B, Nk]``. Where no mask says whether attention is causal, is_causal does, or else
    ``module.is_causal``. Dropout is applied in training only. What padding tokens are given means
    nothing; eager gives them something else, so pad on the left to generate from their end.

    Returns o ``[B, Nq, H, D]`` and None for the weights, which are never formed.

    Raises:
        ValueError: another mask, an argument of ``REFUSED``, or nothing that says whether attention
            is causal.
    """
    for name in REFUSED:
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ValueError(f"fa_v1 and fa_v2 do not take {name}; eager attention does")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", None)
    if attention_mask is not None and attention_mask.dtype in (CAUSAL, BOTH_WAYS):
        causal = attention_mask.dtype == CAUSAL
        kept = attention_mask[:, 0, 0].bool()
        attention_mask = kept.expand(len(query), -1) if attention_mask.numel() > 1 else None
    if causal is None:
        raise ValueError(
            "fa_v1 and fa_v2 must be told whether attention is causal: by the mask, by is_causal, "
            f"or by the module's is_causal; {type(module).__name__} has none"
        )
    _check_window(sliding_window, key.shape[2], causal)
    options = dict(causal=causal, scale=scaling, dropout_p=dropout if module.training else 0.0)
    if attention_mask is None:
        o = function(query, key, value, **options)
    elif attention_mask.dim() != 2:
        raise ValueError(
            "attention_mask must be [B, N], 1 at tokens and 0 at padding, for fa_v1 and fa_v2; got "
            f"shape {tuple(attention_mask.shape)}"
        )
    elif causal and query.shape[2] == key.shape[2]:  # tokens and padding as two segments
        o = function(query, key, value, segment_ids=attention_mask.int(), **options)
    else:
        o = _one_by_one(function, query, key, value, attention_mask, **options)
    return o.transpose(1, 2).contiguous(), None


def _one_by_one(
    function: Callable, q: Tensor, k: Tensor, v: Tensor, kept: Tensor, *, causal: bool, **options
) -> Tensor:
    """Each batch entry without its padding keys: where queries and keys are not the same tokens, as
    with a cache or across, or may see both ways."""
    if causal and not kept[:, -q.shape[2] :].all():
        raise ValueError("attention_mask must be 1 at new tokens where there is a cache; got 0")
    return torch.cat(
        [
            function(q[b, None], k[b, None, :, keys], v[b, None, :, keys], causal=causal, **options)
            for b, keys in enumerate(kept)
        ]
    )


def _check_window(window: int | None, n: int, causal: bool) -> None:
    """Refuses a window, or chunks, that hide one of n tokens from another. As transformers' masks
    have it, a causal window counts the token itself; one that looks both ways does not."""
    least = n if causal else n - 1
    if window is not None and window < least:
        raise ValueError(
            f"fa_v1 and fa_v2 have no sliding window or chunks: for {n} tokens its size must be at "
            f"least {least}; got {window}"
        )


def _interface(function: Callable) -> Callable:
    def attention(module, query, key, value, attention_mask, **kwargs):
        return attend(function, module, query, key, value, attention_mask, **kwargs)

    return attention


for _name, _function in (("fa_v1", flash_attention_v1), ("fa_v2", flash_attention_v2)):
    AttentionInterface.register(_name, _interface(_function))
    AttentionMaskInterface.register(_name, mask)
