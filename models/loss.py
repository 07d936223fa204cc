"""The training loss: over the logits of all tokens at once, or of a chunk of tokens at a time."""

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.checks import check_number

IGNORE = -100


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats per target, computed in float32.

    logits ``[..., V]`` of any float dtype; targets ``[...]`` int64 in ``[0, V)``. Positions whose
    target is -100 count neither in the sum nor in the mean; if all are, the mean is NaN. reduction:
    "mean", or "none" for each target's own, ``[...]``, 0 where it is -100.
    """
    losses = F.cross_entropy(
        logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORE, reduction=reduction
    )
    return losses.view(targets.shape) if reduction == "none" else losses


class FullLoss:
    """Next-token loss over the logits of all tokens: O(N V) memory, about 12 V bytes a token."""

    def __init__(self) -> None:
        self._cross_entropy = cross_entropy

    def compile(self) -> None:
        """Fuse the way from logits to losses: half precision logits get no float32 copy, and a
        token takes about 4 V bytes."""
        self._cross_entropy = torch.compile(cross_entropy)

    def __call__(self, model: nn.Module, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Mean loss in nats of tokens, int64 ``[B, N + 1]``; of targets ``[B, N]`` if given."""
        return self._cross_entropy(model(tokens[:, :-1]), _targets(tokens, targets))

    @torch.no_grad()
    def per_token(self, model: nn.Module, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Each token's own loss, float32 ``[B, N]``; without gradient."""
        logits = model(tokens[:, :-1])
        return self._cross_entropy(logits, _targets(tokens, targets), reduction="none")


class ChunkedLoss:
    """The same loss over a chunk of tokens at a time: O(N width) memory, whatever V is.

    ``model`` is one whose ``model(idx, head=False)`` gives features ``[B, N, width]``, and
    ``model.head_weight`` the matrix ``[V, width]`` that makes logits of them.

    Args:
        chunk_tokens: tokens whose logits exist at one time; "auto": see ``chunk_size``.

    Raises:
        ValueError or TypeError: for any other ``chunk_tokens``.
    """

    def __init__(self, chunk_tokens: int | Literal["auto"] = "auto") -> None:
        if chunk_tokens != "auto":
            check_number("chunk_tokens", chunk_tokens, whole=True, at_least=1)
        self.chunk_tokens = chunk_tokens

    def __call__(self, model: nn.Module, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Mean loss in nats of tokens, int64 ``[B, N + 1]``; of targets ``[B, N]`` if given."""
        features = model(tokens[:, :-1], head=False)
        return linear_cross_entropy(
            features, model.head_weight, _targets(tokens, targets), self.chunk_tokens
        )

    @torch.no_grad()
    def per_token(self, model: nn.Module, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Each token's own loss, float32 ``[B, N]``; without gradient."""
        features = model(tokens[:, :-1], head=False)
        targets = _targets(tokens, targets)
        return linear_cross_entropy(
            features, model.head_weight, targets, self.chunk_tokens, reduction="none"
        )


def _targets(tokens: Tensor, targets: Tensor | None) -> Tensor:
    """What is predicted: the targets given, or each token's successor."""
    return tokens[:, 1:] if targets is None else targets


# Libraries looked at, and why none serves. Liger-Kernel: Triton kernels, no CPU. Apple's
# cut-cross-entropy: likewise (its path without Triton holds the logits), and by default it leaves
# small gradients out. torch.nn.functional.linear_cross_entropy: chunks from torch 2.13 on only, and
# under autocast its products stay in float32.
def linear_cross_entropy(
    features: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_tokens: int | Literal["auto"] = "auto",
    reduction: str = "mean",
) -> Tensor:
    """``cross_entropy(features @ weight.T, targets)`` that never holds all logits.

    Under autocast the products are taken in its dtype, as those of a linear layer. Logits become
    losses in float32, and the gradient of ``weight`` is summed over the chunks in float32.

    Args:
        features: ``[..., width]``.
        weight: ``[V, width]``.
        targets: int64 ``[...]`` in ``[0, V)``, or -100: see ``cross_entropy``.
        chunk_tokens: tokens whose logits exist at one time; "auto": see ``chunk_size``.
        reduction: "mean", or "none" for each target's own loss, which has no gradient.

    Memory: the gradients of features (in the dtype of the products) and of weight (float32) are
    kept for backward, nothing else. Both are made in forward, while a chunk's logits exist:
    making the logits again in backward keeps as many bytes and costs a fourth product.

    Raises:
        RuntimeError: on double backward.
    """
    x = features.flatten(0, -2)  # [N, width]
    t = targets.flatten()  # [N]
    dtype = _product_dtype(x)
    chunk = chunk_size(*x.shape, weight.size(0), chunk_tokens)
    if reduction == "none":
        return _losses(x.detach(), weight.detach(), t, dtype, chunk).view(targets.shape)
    if torch.is_grad_enabled():
        return _MeanLinearCrossEntropy.apply(x, weight, t, dtype, chunk)
    return _losses(x, weight, t, dtype, chunk).sum() / (t != IGNORE).sum()


MIN_LOGITS, MAX_LOGITS = 2**24, 2**28  # of an automatic chunk: 64 MiB and 1 GiB in float32


def chunk_size(
    n_tokens: int, width: int, vocab_size: int, chunk_tokens: int | Literal["auto"]
) -> int:
    """Tokens of a chunk.

    "auto": as many as make a chunk's logits as large as the features of all tokens, within
    ``MIN_LOGITS`` and ``MAX_LOGITS``: large matrix products, that add little to what is there.
    In any case less than 2^31 logits, the most that some of PyTorch's kernels can index.
    """
    if chunk_tokens == "auto":
        n_logits = min(max(n_tokens * width, MIN_LOGITS), MAX_LOGITS)
        chunk_tokens = n_logits // vocab_size
    return max(1, min(chunk_tokens, (2**31 - 1) // vocab_size))


class _MeanLinearCrossEntropy(torch.autograd.Function):
    """Mean loss of x ``[N, width]``, weight ``[V, width]`` and targets ``[N]``."""

    @staticmethod
    def forward(ctx, x, weight, targets, dtype, chunk):
        sum_dtype = torch.promote_types(dtype, torch.float32)
        total = x.new_zeros((), dtype=sum_dtype)
        # Gradients of the sum: in half precision the mean's would be too small for float16.
        grad_x = torch.empty_like(x, dtype=dtype) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if ctx.needs_input_grad[1] else None
        with _no_autocast(x):
            w = weight.to(dtype)
            for rows in _chunks(len(x), chunk):
                x_rows, t = x[rows].to(dtype), targets[rows]
                log_p = F.log_softmax(F.linear(x_rows, w), dim=-1, dtype=sum_dtype)  # [C, V]
                total += F.nll_loss(log_p, t, ignore_index=IGNORE, reduction="sum")
                grad_logits = _grad_logits(log_p, t).to(dtype)  # [C, V]
                del log_p
                if grad_x is not None:
                    grad_x[rows] = grad_logits @ w
                if grad_weight is not None:
                    grad_weight += _exact_product(grad_logits.T, x_rows, sum_dtype)
                del grad_logits
        n_targets = (targets != IGNORE).sum()
        ctx.save_for_backward(grad_x, grad_weight, n_targets)
        ctx.dtypes = x.dtype, weight.dtype
        return total / n_targets

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():  # create_graph=True: the gradients kept would look constant
            raise RuntimeError(
                "linear_cross_entropy has no double backward; use cross_entropy of all logits"
            )
        *grads, n_targets = ctx.saved_tensors
        scale = grad / n_targets.clamp(min=1)  # without a target the gradients are 0
        grad_x, grad_weight = (
            None if g is None else g.to(dtype, copy=True).mul_(scale)
            for g, dtype in zip(grads, ctx.dtypes, strict=True)
        )
        return grad_x, grad_weight, None, None, None


def _losses(x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, chunk: int) -> Tensor:
    """Each token's loss, ``[N]``."""
    losses = x.new_empty(len(x), dtype=torch.promote_types(dtype, torch.float32))
    with _no_autocast(x):
        w = weight.to(dtype)
        for rows in _chunks(len(x), chunk):
            logits = F.linear(x[rows].to(dtype), w)  # [C, V]
            log_p = F.log_softmax(logits, dim=-1, dtype=losses.dtype)
            losses[rows] = F.nll_loss(log_p, targets[rows], ignore_index=IGNORE, reduction="none")
            del logits, log_p
    return losses


def _grad_logits(log_p: Tensor, targets: Tensor) -> Tensor:
    """Gradient of the summed loss, written over log_p ``[C, V]``: p - 1 at the target, else p.

    Rows whose target is ignored are 0.
    """
    counts = targets != IGNORE
    grad = log_p.exp_()
    grad[torch.arange(len(grad), device=grad.device), targets.where(counts, 0)] -= 1.0
    return grad.mul_(counts[:, None])


def _exact_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a @ b`` in ``dtype``: a sum over tokens, not rounded to half precision (or infinite)."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def _product_dtype(x: Tensor) -> torch.dtype:
    """What a linear layer would compute in."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


def _no_autocast(x: Tensor) -> torch.autocast:
    """Every dtype below is chosen by hand."""
    return torch.autocast(x.device.type, enabled=False)


def _chunks(n: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, n)) for start in range(0, n, size))
