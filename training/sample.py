"""A short text from the trained model: the quickest look at what it learnt."""

import lightning as L
import torch
from omegaconf import DictConfig
from rich.panel import Panel
from rich.text import Text
from torch import nn

from training.console import console


def print_sample(trainer: L.Trainer, tokenizer, settings: DictConfig, seed: int) -> None:
    """Prints a text of the trained model; ``settings`` is the config's ``sample``."""
    if settings.max_new_tokens == 0:
        return
    # Lightning has moved the model off the GPU after training.
    model = trainer.lightning_module.model.to(trainer.strategy.root_device)
    with trainer.precision_plugin.forward_context():
        text = sample_text(model, tokenizer, **settings, seed=seed)
    console.print(Panel(Text(text), title="sample", title_align="left"))


def sample_text(
    model: nn.Module,
    tokenizer,
    *,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
) -> str:
    """The prompt and its continuation by ``model.generate``; an empty prompt starts a document.

    The draw has a generator of its own, so that it changes no other random number of the run.
    """
    device = next(model.parameters()).device
    ids = tokenizer.encode([prompt])[0] if prompt else []
    idx = torch.tensor([[int(i) for i in ids] or [tokenizer.eot]], device=device)  # [1, N]
    generator = torch.Generator(device=device).manual_seed(seed)
    out = model.generate(
        idx, max_new_tokens, temperature=temperature, top_k=top_k, generator=generator
    )
    return prompt + tokenizer.decode(out[0, idx.shape[1] :].tolist())
