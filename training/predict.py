"""The peak memory of a training step before it runs, by playing it on tensors without data.

Fake tensors have a shape, a dtype and a lifetime, but no memory: a step of any length is played in
seconds, on a machine without a GPU. A ledger counts their bytes as PyTorch's allocator on a GPU
would (training/ledger.py), and what only a GPU takes is added (training/cuda_memory.py).
"""

import tempfile
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from data.errors import DataError
from models.lit_gpt import LitGPT
from training.batching import BatchPlan, plan_batch
from training.build import build_model, vocab_size
from training.cuda_memory import CUBLAS_WORKSPACES, LikeCuda, PlayedOffload, scratch
from training.errors import ConfigError
from training.ledger import Ledger
from training.memory_names import PARTS

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "32-true": None}


@dataclass(frozen=True)
class Prediction:
    """Bytes allocated on a GPU at the peak of a training step; ``parts``: by ``PARTS``.

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
        return Prediction(_play(lit, batch, cfg.precision))


def _model(cfg: DictConfig) -> LitGPT:
    settings = OmegaConf.to_container(cfg.model, resolve=True)
    settings["vocab_size"] = vocab_size(settings.get("vocab_size"), _n_tokens(cfg))
    uncompiled = OmegaConf.merge(cfg, {"compile": False})
    lit = build_model(uncompiled, settings, instantiate(cfg.attention))
    if lit.model.offload:
        lit.model.offload = PlayedOffload()
    return lit.train()


def _n_tokens(cfg: DictConfig) -> int:
    """How many tokens the tokeniser knows, without its corpus; 0 where that does not matter."""
    if cfg.model.get("vocab_size") is not None:
        return 0
    tokenizer = instantiate(cfg.tokenizer)
    n_tokens = getattr(tokenizer, "vocab_size", None) or getattr(tokenizer, "wanted", None)
    if n_tokens is None:  # that of a file, which fitting copies
        try:
            with tempfile.TemporaryDirectory() as folder:
                tokenizer.fit([], Path(folder))
        except DataError as error:
            raise ConfigError(f"{error}; or give model.vocab_size") from error
        n_tokens = tokenizer.vocab_size
    return n_tokens


def _play(lit: LitGPT, batch: BatchPlan, precision: str) -> dict[str, int]:
    """Bytes by part at the peak of a step that follows another one."""
    dtype = AUTOCAST["bf16-mixed" if precision == "auto" else precision]
    optimizer = lit.optim.optimizer(lit.model, fused=precision != "16-mixed")
    for group in optimizer.param_groups:
        group["foreach"] = not group["fused"]  # the default on a GPU
    ledger = Ledger("cpu", scratch)
    for t in [*lit.model.parameters(), *lit.model.buffers()]:
        ledger.note(t, "parameters")
    _end_of_a_step(optimizer, ledger)
    ledger.live["rest"] += CUBLAS_WORKSPACES
    with ExitStack() as stack:
        for p in lit.model.parameters():
            hook = p.register_post_accumulate_grad_hook(lambda p: ledger.move(p.grad, "gradients"))
            stack.callback(hook.remove)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(ledger.watching(lit.model))
        stack.enter_context(LikeCuda())
        stack.enter_context(ledger)
        _step(lit, optimizer, batch, dtype)
    return {part: ledger.peak[part] for part in PARTS}


def _end_of_a_step(optimizer: Optimizer, ledger: Ledger) -> None:
    """Adam's state and the gradients, as a step leaves them for the next one to meet."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
            ledger.note(p.grad, "gradients")
            state = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
            state["step"] = torch.zeros((), dtype=torch.float32)
            optimizer.state[p] = state
            for t in state.values():
                ledger.note(t, "optimizer")


def _step(lit: LitGPT, optimizer: Optimizer, batch: BatchPlan, dtype: torch.dtype | None) -> None:
    """An optimizer step in Lightning's order: gradients are dropped after the first forward."""
    for i in range(min(batch.accumulate, 2)):  # a third micro-batch is like the second
        tokens = torch.zeros(batch.micro_batch_size, batch.seq_len + 1, dtype=torch.int64)
        # As Lightning has it: without a cache of the parameters in half precision.
        autocast = torch.autocast("cpu", dtype, cache_enabled=False) if dtype else nullcontext()
        with autocast:
            loss = lit.loss(tokens) / batch.accumulate
        if i == 0:
            optimizer.zero_grad()
        loss.backward()
        del loss, tokens
    lit.configure_gradient_clipping(optimizer)
    optimizer.step()
