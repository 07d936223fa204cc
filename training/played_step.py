"""One training step on fake tensors, with the bytes it would take on a GPU."""

from contextlib import ExitStack, nullcontext

import torch
from torch.optim import Optimizer

from models.lit_gpt import LitGPT
from training.batching import BatchPlan
from training.cuda_memory import CUBLAS_WORKSPACES, LikeCuda, scratch
from training.ledger import Ledger
from training.memory_names import PARTS

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "32-true": None}


def peak_parts(lit: LitGPT, batch: BatchPlan, precision: str) -> dict[str, int]:
    """Bytes by part at the peak of a step that follows another one.

    To be called in the FakeTensorMode that ``lit`` was made in, on the CPU. ``precision``: a key of
    ``AUTOCAST``.
    """
    dtype = AUTOCAST[precision]
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
