"""A GPT-2 style decoder: pre-norm blocks, tied embeddings, rotary or learned positions."""

import math
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_attention import Attention
from models.attention import CausalSelfAttention, rotary_tables
from models.checks import check_number
from models.offload import HostOffload

INIT_STD = 0.02  # GPT-2's
CHECKPOINTING = ("none", "block")


class MLP(nn.Module):
    """``width -> mlp_ratio * width -> width`` with GPT-2's GELU (the tanh approximation)."""

    def __init__(self, *, width: int, mlp_ratio: int, bias: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(width, mlp_ratio * width, bias=bias)
        self.proj = nn.Linear(mlp_ratio * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x), approximate="tanh"))


class Block(nn.Module):
    """One pre-norm transformer block: attention, then MLP, each added to the residual stream."""

    def __init__(
        self,
        *,
        width: int,
        n_head: int,
        n_kv_head: int,
        attention: Attention,
        mlp_ratio: int,
        dropout: float,
        bias: bool,
    ) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width, bias=bias)
        self.attention = CausalSelfAttention(
            width=width,
            n_head=n_head,
            n_kv_head=n_kv_head,
            attention=attention,
            dropout=dropout,
            bias=bias,
        )
        self.norm_mlp = nn.LayerNorm(width, bias=bias)
        self.mlp = MLP(width=width, mlp_ratio=mlp_ratio, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_attention(x), rotary))
        return x + self.dropout(self.mlp(self.norm_mlp(x)))


class GPT(nn.Module):
    """A causal language model over token ids.

    Args:
        vocab_size: number of token ids, padding included.
        seq_len: longest context in tokens.
        n_layer: number of blocks.
        n_head: number of query heads; must divide ``width``.
        n_kv_head: number of key/value heads; must divide ``n_head``. None means ``n_head``.
        width: channels of the residual stream.
        attention: the backend that every block calls; it holds no parameters.
        mlp_ratio: the MLP's hidden channels per channel of ``width``.
        dropout: probability for embeddings, attention weights and both residual branches.
            Active in training mode only.
        positions: "rotary" (queries and keys are rotated) or "learned" (GPT-2's table).
        rope_base: base of the rotary frequencies; used with "rotary" only.
        bias: whether linear layers and norms have a bias.
        activation_checkpointing: "none" keeps every block's activations for backward; "block"
            keeps its input only (4 width bytes a token in float32) and runs it again in backward.
        offload_checkpoints: keep these inputs in host memory between forward and backward, when
            they are on a GPU; needs ``activation_checkpointing="block"``.

    Raises:
        ValueError or TypeError: naming the argument, what was given and what is accepted.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        seq_len: int,
        n_layer: int,
        n_head: int,
        n_kv_head: int | None = None,
        width: int,
        attention: Attention,
        mlp_ratio: int = 4,
        dropout: float = 0.0,
        positions: str = "rotary",
        rope_base: float = 10000.0,
        bias: bool = True,
        activation_checkpointing: str = "none",
        offload_checkpoints: bool = False,
    ) -> None:
        super().__init__()
        n_kv_head = n_head if n_kv_head is None else n_kv_head
        sizes = {
            "vocab_size": vocab_size,
            "seq_len": seq_len,
            "n_layer": n_layer,
            "n_head": n_head,
            "n_kv_head": n_kv_head,
            "width": width,
            "mlp_ratio": mlp_ratio,
        }
        for name, value in sizes.items():
            check_number(name, value, whole=True, at_least=1)
        check_number("dropout", dropout, at_least=0, below=1)
        check_number("rope_base", rope_base, above=0)
        _check_heads(width=width, n_head=n_head, n_kv_head=n_kv_head, positions=positions)
        _check_checkpointing(activation_checkpointing, offload_checkpoints)
        if not isinstance(attention, Attention):
            given = type(attention).__name__
            raise TypeError(f"attention is a {given}; give a flash_attention.Attention module")
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.n_layer = n_layer
        self.width = width
        self.activation_checkpointing = activation_checkpointing
        self.offload = HostOffload() if offload_checkpoints else None

        self.token_embedding = nn.Embedding(vocab_size, width)
        self.position_embedding = nn.Embedding(seq_len, width) if positions == "learned" else None
        if positions == "rotary":
            cos, sin = rotary_tables(seq_len, width // n_head, rope_base)
            # Not saved: they follow from the configuration, and seq_len may change on resume.
            self.register_buffer("rotary_cos", cos, persistent=False)
            self.register_buffer("rotary_sin", sin, persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(
                width=width,
                n_head=n_head,
                n_kv_head=n_kv_head,
                attention=attention,
                mlp_ratio=mlp_ratio,
                dropout=dropout,
                bias=bias,
            )
            for _ in range(n_layer)
        )
        self.norm = nn.LayerNorm(width, bias=bias)
        self._init_weights()

    def _init_weights(self) -> None:
        """GPT-2's: N(0, 0.02), biases 0; layers that write to the residual stream start smaller.

        The stream sums ``2 n_layer`` branches; ``1 / sqrt(2 n_layer)`` keeps its variance constant.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            for proj in (block.attention.proj, block.mlp.proj):
                nn.init.normal_(proj.weight, std=INIT_STD / math.sqrt(2 * self.n_layer))

    def forward(self, idx: Tensor, *, head: bool = True) -> Tensor:
        """Next-token logits ``[B, N, vocab_size]`` of token ids idx, int64 ``[B, N]``.

        head: False returns the normalised features ``[B, N, width]``, which ``head_weight`` makes
        logits of.
        """
        x = self._trunk(idx)
        return self._head(x) if head else x

    @property
    def head_weight(self) -> Tensor:
        """The output matrix ``[vocab_size, width]``: the tied embedding."""
        return self.token_embedding.weight

    def _trunk(self, idx: Tensor) -> Tensor:
        """Token ids ``[B, N]`` -> normalised features ``[B, N, width]``."""
        n = idx.size(1)
        if n > self.seq_len:
            raise ValueError(f"idx has {n} tokens a row; the model's seq_len is {self.seq_len}")
        x = self.token_embedding(idx)
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[:n]
            rotary = None
        else:
            rotary = (self.rotary_cos, self.rotary_sin)
        x = self.dropout(x)
        with self.offload.saving() if self.offload else nullcontext():
            for block in self.blocks:
                x = self._run(block, x, rotary)
        return self.norm(x)

    def _run(self, block: Block, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        if self.activation_checkpointing == "none":
            return block(x, rotary)
        # checkpoint() saves what it is given: x alone, for the tables are there anyway.
        return checkpoint(partial(block, rotary=rotary), x, use_reentrant=False)

    def _head(self, x: Tensor) -> Tensor:
        """Features ``[..., width]`` -> logits ``[..., vocab_size]``, by the tied embedding."""
        return F.linear(x, self.head_weight)

    def n_params(self) -> int:
        """Number of parameters, embeddings included; the tied embedding counts once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, seq_len: int) -> float:
        """Forward plus backward FLOPs of one training token in sequences of ``seq_len`` tokens.

        1. A multiply-add is 2 FLOPs, so a weight matrix of P entries costs 2 P per token forward.
           P: every linear layer's weight, and the vocabulary head (vocab_size * width). Looking up
           an embedding costs nothing; norms, biases, GELU, softmax and rotation are left out.
        2. Attention, per layer: a query's scores with N keys cost 2 N width (n_head * head_dim =
           width; grouping key/value heads saves memory, not FLOPs), the weighted sum of N values
           again 2 N width. Causal masking leaves half of the pairs: 2 N width in all.
        3. Backward computes two products (for the input and for the weight) for each one of
           forward: twice its FLOPs. Together three times forward.

        These are the FLOPs that the model needs, not those that a backend spends: what
        FlashAttention recomputes and what naive attention computes above the diagonal are not in.
        """
        matrices = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        head = self.head_weight.numel()
        attention = self.n_layer * 2 * seq_len * self.width
        return 3.0 * (2 * (matrices + head) + attention)

    @torch.no_grad()
    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Append ``max_new_tokens`` sampled tokens to idx, int64 ``[B, N]`` with N >= 1.

        Args:
            temperature: divides the logits; 0 takes the most likely token.
            top_k: sample among the k most likely tokens only; None: among all.
            generator: source of randomness, on idx's device.

        Returns int64 ``[B, N + max_new_tokens]``. Each token sees the last ``seq_len`` ones at
        most. Runs in eval mode and restores the mode it found.
        """
        if idx.size(1) == 0:
            raise ValueError("idx has no token; give at least one to start from")
        check_number("max_new_tokens", max_new_tokens, whole=True, at_least=0)
        check_number("temperature", temperature, at_least=0)
        if top_k is not None:
            check_number("top_k", top_k, whole=True, at_least=1)
        was_training = self.training
        self.eval()
        try:
            for _ in range(max_new_tokens):
                # _trunk, not self(...): a compiled forward would recompile as the context grows,
                # and only the last position's logits are needed.
                logits = self._head(self._trunk(idx[:, -self.seq_len :])[:, -1])  # [B, V]
                next_idx = _sample(logits.float(), temperature, top_k, generator)  # [B, 1]
                idx = torch.cat((idx, next_idx), dim=1)
        finally:
            self.train(was_training)
        return idx


def _sample(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """One token id per row of logits ``[B, V]``: int64 ``[B, 1]``."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    k = logits.size(-1) if top_k is None else min(top_k, logits.size(-1))
    top_logits, top_ids = logits.topk(k, dim=-1)  # [B, k] each
    probs = (top_logits / temperature).softmax(dim=-1)
    return top_ids.gather(-1, torch.multinomial(probs, 1, generator=generator))


def _check_checkpointing(activation_checkpointing: str, offload_checkpoints: bool) -> None:
    if activation_checkpointing not in CHECKPOINTING:
        raise ValueError(
            f"activation_checkpointing={activation_checkpointing!r} must be 'none' or 'block'"
        )
    if not isinstance(offload_checkpoints, bool):
        raise TypeError(f"offload_checkpoints={offload_checkpoints!r} must be True or False")
    if offload_checkpoints and activation_checkpointing == "none":
        raise ValueError(
            "offload_checkpoints=True needs activation_checkpointing='block': without checkpoints "
            "there is nothing to move"
        )


def _check_heads(*, width: int, n_head: int, n_kv_head: int, positions: str) -> None:
    if width % n_head:
        raise ValueError(f"width={width} must be a multiple of n_head={n_head}")
    if n_head % n_kv_head:
        raise ValueError(f"n_head={n_head} must be a multiple of n_kv_head={n_kv_head}")
    if positions not in ("rotary", "learned"):
        raise ValueError(f"positions={positions!r} must be 'rotary' or 'learned'")
    if positions == "rotary" and width // n_head % 2:
        raise ValueError(
            f"positions='rotary' needs an even head size; width={width} with n_head={n_head} "
            f"gives {width // n_head}"
        )
