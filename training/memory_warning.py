"""One sentence before a run that will not fit into the GPU: what it needs, what would help."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from omegaconf import DictConfig

from training.batching import plan_batch
from training.cli import shown
from training.console import console
from training.devices import Hardware
from training.predict import longest_that_fits, predict_peak, with_changes
from training.units import in_gib

MULTIPLE = 1024  # of the seq_len that is advised


def warn_if_too_large(cfg: DictConfig, hardware: Hardware, vocab_size: int) -> None:
    """Print a warning if a step will take more than the GPU has free now; nothing on a CPU.

    A run goes on in any case: a prediction may be wrong, or fail. A compiled model is taken for one
    that is not. ``vocab_size``: the model's.
    """
    if hardware.device != "cuda" or not cfg.predict_memory:
        return
    try:
        settled = {"precision": hardware.precision, "model.vocab_size": vocab_size}
        warning = warning_of(with_changes(cfg, settled), free_bytes())
    except Exception as error:  # of any kind: the run is what counts
        first_line = (str(error).splitlines() or ["no message"])[0]
        console.print(f"the memory was not predicted ({type(error).__name__}: {first_line})")
        return
    if warning:
        console.print(warning)


def free_bytes() -> int:
    """What this process can still allocate on the current GPU."""
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def warning_of(cfg: DictConfig, available: int) -> str | None:
    """The sentence; None for a run whose predicted peak is at most ``available`` bytes."""
    peak = predict_peak(cfg).peak_bytes
    if peak <= available:
        return None
    advice = _advice(cfg, lambda changed: predict_peak(changed).peak_bytes <= available, available)
    return (
        f"warning: a training step will take about {in_gib(peak)} GiB and {in_gib(available)} GiB "
        f"are free on the GPU; {advice} (predict_memory=false leaves this prediction out)"
    )


def _advice(cfg: DictConfig, fits: Callable[[DictConfig], bool], available: int) -> str:
    """The cheapest change that makes it fit; else all of them, as far as they are needed."""
    changes = list(_changes(cfg))
    for change in changes:
        if fits(with_changes(cfg, change)):
            return f"{_typed(change)} would make it fit"
    together: dict[str, Any] = {}
    for change in changes:
        together |= change
        if together != change and fits(with_changes(cfg, together)):
            return f"{_typed(together)} would make it fit"
    longest = longest_that_fits(with_changes(cfg, together), available, MULTIPLE)
    given = f" with {_typed(together)}" if together else ""
    if longest:
        shorter = {"seq_len": longest}
        if not fits(with_changes(cfg, together | shorter)):  # several would go into a forward pass
            shorter["micro_batch_tokens"] = longest
        return f"{_typed(shorter)}{given} would make it fit"
    return f"no seq_len that is a multiple of {MULTIPLE} would make it fit{given}"


def _changes(cfg: DictConfig) -> Iterator[dict[str, Any]]:
    """What is left to change, the cheapest first: flash_v1 is faster than standard attention, the
    chunked loss costs next to nothing, smaller micro-batches little, a checkpointed block's forward
    is computed twice, and offloading adds copies to that."""
    model = cfg.model
    if str(cfg.attention.get("_target_", "")).endswith("NaiveAttention"):
        yield {"attention": FLASH}
    if str(cfg.loss.get("_target_", "")).endswith("FullLoss"):
        yield {"loss": CHUNKED}
    batch = plan_batch(cfg.seq_len, cfg.global_batch_tokens, cfg.micro_batch_tokens)
    if batch.micro_batch_size > 1:
        yield {"micro_batch_tokens": cfg.seq_len}
    checkpointing = {"model.activation_checkpointing": "block"}
    if model.get("activation_checkpointing") == "none":
        yield checkpointing
    if model.get("offload_checkpoints") is False:
        yield checkpointing | {"model.offload_checkpoints": True}


# Choices of a group, by their name on the command line.
FLASH = {"_target_": "flash_attention.FlashAttentionV1"}
CHUNKED = {"_target_": "models.loss.ChunkedLoss"}
_NAMES = {"attention": "flash_v1", "loss": "chunked"}


def _typed(change: dict[str, Any]) -> str:
    """As on the command line."""
    return " ".join(f"{key}={_NAMES.get(key, shown(value))}" for key, value in change.items())
