"""The peak memory of a training step before it runs, by playing it on tensors without data.

Fake tensors have a shape, a dtype and a lifetime, but no memory: a step of any length is played in
seconds, on a machine without a GPU. A ledger counts their bytes as PyTorch's allocator on a GPU
would (training/ledger.py), and what only a GPU takes is added (training/cuda_memory.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch._subclasses.fake_tensor import FakeTensorMode

from models.lit_gpt import LitGPT
from training.batching import plan_batch
from training.build import build_model, tokens_without_corpus, vocab_size
from training.cuda_memory import PlayedOffload
from training.played_step import peak_parts

LONGEST = 2**31  # tokens: no search goes beyond


@dataclass(frozen=True)
class Prediction:
    """Bytes allocated on a GPU at the peak of a training step, by ``memory_names.PARTS``.

    Unlike the parts that a run reports, these are all of what is alive at the peak: temporaries
    belong to the part that runs, or whose forward is being differentiated. "rest" holds cuBLAS's
    workspaces too.
    """

    parts: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())


def predict_peak(cfg: DictConfig) -> Prediction:
    """What ``torch.cuda.max_memory_allocated`` will be over the steps after the warm-up.

    Args:
        cfg: the config of ``train.py``; precision "auto" means bf16-mixed, the device is taken for
            a GPU, and a compiled model for one that is not.

    Raises:
        ConfigError: settings of which no model can be made.
    """
    batch = plan_batch(cfg.seq_len, cfg.global_batch_tokens, cfg.micro_batch_tokens)
    with FakeTensorMode(allow_non_fake_inputs=True):
        lit = _model(cfg)
        precision = "bf16-mixed" if cfg.precision == "auto" else cfg.precision
        return Prediction(peak_parts(lit, batch, precision))


def with_changes(cfg: DictConfig, changes: dict[str, Any]) -> DictConfig:
    """A copy of the config with some keys, dotted, changed."""
    cfg = cfg.copy()
    for key, value in changes.items():
        OmegaConf.update(cfg, key, value, merge=False)
    return cfg


def longest_that_fits(cfg: DictConfig, card_bytes: int, multiple: int = 128) -> int:
    """A ``seq_len``, a multiple of ``multiple``, that fits into ``card_bytes`` while the next does
    not: the longest, as the peak grows with the length.

    One sequence is in a forward pass, as ``micro_batch_tokens=1`` has it; all else stays as ``cfg``
    has it. 0 if not even the shortest fits. A number for ``global_batch_tokens`` is a bound too.
    """

    one = with_changes(cfg, {"micro_batch_tokens": 1})

    @cache
    def peak(n: int, **model: int) -> int:
        changes = {"seq_len": n, **{f"model.{key}": value for key, value in model.items()}}
        return predict_peak(with_changes(one, changes)).peak_bytes

    def estimate(n: int) -> float:
        """From a few layers: each further one takes as much as the third."""
        two, three = peak(n, n_layer=2), peak(n, n_layer=3)
        return two + (three - two) * (cfg.model.n_layer - 2)

    most = LONGEST if cfg.global_batch_tokens == "auto" else cfg.global_batch_tokens
    start = [cfg.seq_len, 32 * cfg.seq_len]
    if cfg.model.get("n_layer", 0) > 6:
        near = _search(estimate, card_bytes, most, multiple, start)
        start = [near, near + multiple, near - multiple]
    return _search(peak, card_bytes, most, multiple, start)


def _search(
    peak: Callable[[int], float], card_bytes: int, most: int, multiple: int, start: list[int]
) -> int:
    """A length that fits while the next does not, up to ``most``; ``start``: to be tried first."""
    low, high = 0, most // multiple * multiple + multiple  # what fits, and what does not
    peaks: dict[int, float] = {}
    while high - low > multiple:
        start = [n for n in start if low < n < high]
        if start:
            guess = start.pop(0)
        elif len(peaks) < 12:
            # A line through two short lengths points nowhere: 64 times as long at most.
            guess = min(_crossing(peaks, card_bytes), 64 * (low or multiple))
        else:  # halving is surer than a parabola
            guess = (low + high) / 2
        steps = (int(guess) - low) // multiple
        guess = low + min(max(steps, 1), (high - low) // multiple - 1) * multiple
        peaks[guess] = peak(guess)
        if peaks[guess] <= card_bytes:
            low = guess
        else:
            high = guess
    return low


def _crossing(peaks: dict[int, float], card_bytes: int) -> float:
    """Where the parabola through the three peaks nearest to the card's size (the line through two)
    reaches it."""
    nearest = sorted(peaks, key=lambda n: abs(peaks[n] - card_bytes))[:3]
    x0 = nearest[0]
    if len(nearest) == 1:
        return 2.0 * x0 if peaks[x0] <= card_bytes else x0 / 2
    for points in (nearest, nearest[:2]):
        # In units of x0: the numbers of bytes and of tokens squared would not go well together.
        x = np.array(points) / x0 - 1
        y = np.array([peaks[n] - card_bytes for n in points], dtype=float) / card_bytes
        roots = np.roots(np.polyfit(x, y, len(points) - 1))
        roots = [r.real for r in roots if abs(r.imag) < 1e-9 and r.real > -1]
        if roots:
            return x0 * (1 + min(roots, key=abs))
    return 2.0 * x0


def _model(cfg: DictConfig) -> LitGPT:
    settings = OmegaConf.to_container(cfg.model, resolve=True)
    settings["vocab_size"] = vocab_size(settings.get("vocab_size"), tokens_without_corpus(cfg))
    uncompiled = OmegaConf.merge(cfg, {"compile": False})
    lit = build_model(uncompiled, settings, instantiate(cfg.attention))
    if lit.model.offload:
        lit.model.offload = PlayedOffload()
    return lit.train()
