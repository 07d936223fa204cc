"""How many sequences a step has, derived from tokens, so that losses compare over lengths."""

from dataclasses import dataclass
from typing import Literal

from training.errors import ConfigError


@dataclass(frozen=True)
class BatchPlan:
    """One optimizer step: ``accumulate`` forward passes of ``micro_batch_size`` sequences."""

    seq_len: int
    micro_batch_size: int
    accumulate: int

    @property
    def sequences_per_step(self) -> int:
        return self.micro_batch_size * self.accumulate

    @property
    def tokens_per_step(self) -> int:
        return self.sequences_per_step * self.seq_len


AUTO_TOKENS = 2048  # small steps: a short run on a CPU needs many of them to learn anything


def plan_batch(
    seq_len: int, global_batch_tokens: int | Literal["auto"], micro_batch_tokens: int
) -> BatchPlan:
    """The largest micro-batch that fits ``micro_batch_tokens`` and divides the step evenly.

    "auto" tokens per step are ``AUTO_TOKENS``, or one sequence where that is longer.

    Raises:
        ConfigError: ``global_batch_tokens`` is smaller than one sequence.
    """
    if global_batch_tokens == "auto":
        global_batch_tokens = max(AUTO_TOKENS, seq_len)
    sequences = global_batch_tokens // seq_len
    if sequences < 1:
        raise ConfigError(
            f"global_batch_tokens={global_batch_tokens} holds no sequence of seq_len={seq_len}; "
            f"give at least {seq_len}"
        )
    fits = max(1, micro_batch_tokens // seq_len)
    size = next(n for n in range(min(fits, sequences), 0, -1) if sequences % n == 0)
    return BatchPlan(seq_len=seq_len, micro_batch_size=size, accumulate=sequences // size)
