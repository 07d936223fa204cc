"""Builds the parts of a run from its config."""

import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf

from data.errors import DataError
from data.module import TokenDataModule
from flash_attention import Attention
from models.gpt import GPT
from models.lit_gpt import LitGPT
from training.batching import BatchPlan
from training.checkpoint import AtomicCheckpointIO, SaveCheckpoint
from training.devices import Hardware
from training.errors import ConfigError

VOCAB_MULTIPLE = 64  # what matrix products of a GPU like


def build_data(cfg: DictConfig, batch: BatchPlan) -> TokenDataModule:
    """The data of a run, prepared: tokenised (or found in the cache) and split."""
    data = instantiate(cfg.data, _partial_=True)(
        tokenizer=instantiate(cfg.tokenizer),
        micro_batch_size=batch.micro_batch_size,
        sequences_per_step=batch.sequences_per_step,
        max_steps=cfg.max_steps,
    )
    data.prepare_data()
    data.setup("fit")
    return data


def essentials(cfg: DictConfig, data: TokenDataModule) -> dict[str, Any]:
    """What a checkpoint says about its run, in plain values; a resume compares it."""
    return {
        "model": {
            **OmegaConf.to_container(cfg.model, resolve=True),
            "vocab_size": vocab_size(cfg.model.vocab_size, data.vocab_size),
        },
        "optim": OmegaConf.to_container(cfg.optim, resolve=True),
        "tokenizer": data.tokenizer.fingerprint(),
    }


def vocab_size(given: int | None, tokens: int) -> int:
    """The model's vocabulary for a tokeniser of ``tokens``: as given, or rounded up.

    Raises:
        ConfigError: the given one is too small.
    """
    if given is None:
        return -(-tokens // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if given < tokens:
        raise ConfigError(
            f"model.vocab_size={given} is smaller than the tokeniser's {tokens}; "
            f"give at least {tokens}, or null"
        )
    return given


def tokens_without_corpus(cfg: DictConfig) -> int:
    """How many tokens the tokeniser knows, or is asked to learn, without its corpus; 0 where that
    does not matter, because ``model.vocab_size`` is given.

    Raises:
        ConfigError: only a file that is not there could tell.
    """
    if cfg.model.get("vocab_size") is not None:
        return 0
    tokenizer = instantiate(cfg.tokenizer)
    n_tokens = getattr(tokenizer, "vocab_size", None) or getattr(tokenizer, "wanted", None)
    if n_tokens is None:  # that of a file, which fitting copies
        try:
            tokenizer.fingerprint()  # refuses a name that is missing
            with tempfile.TemporaryDirectory() as folder:
                tokenizer.fit([], Path(folder))
        except DataError as error:
            raise ConfigError(
                f"model.vocab_size is not set, and nothing is tokenised here: {error}; "
                "or give model.vocab_size"
            ) from error
        n_tokens = tokenizer.vocab_size
    return n_tokens


def build_model(cfg: DictConfig, settings: dict[str, Any], attention: Attention) -> LitGPT:
    """The model with its attention backend, and how it is trained.

    ``settings``: the model's, the size of the vocabulary filled in.
    """
    try:
        gpt: GPT = instantiate(settings, _partial_=True)(attention=attention)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model: {error}") from error
    return LitGPT(gpt, instantiate(cfg.optim), cfg.compile, instantiate(cfg.loss))


def build_callbacks(cfg: DictConfig, about: dict[str, Any]) -> list[L.Callback]:
    """The callbacks of the config, null ones left out; checkpoints will hold ``about``."""
    callbacks = [c for c in instantiate(cfg.callbacks).values() if c is not None]
    for callback in callbacks:
        if isinstance(callback, SaveCheckpoint):
            callback.about = about
    return callbacks


def build_trainer(
    cfg: DictConfig,
    hardware: Hardware,
    batch: BatchPlan,
    loggers: list[Logger],
    callbacks: list[L.Callback],
) -> L.Trainer:
    """A Trainer for one device that counts in optimizer steps and prints nothing itself."""
    torch.set_float32_matmul_precision(cfg.trainer.float32_matmul_precision)
    return L.Trainer(
        accelerator=hardware.device,
        devices=1,
        precision=hardware.precision,
        max_steps=cfg.max_steps,
        max_epochs=-1,
        accumulate_grad_batches=batch.accumulate,
        # Lightning counts micro-batches here; None: over epochs, if there is more than one
        val_check_interval=cfg.trainer.val_every_n_steps * batch.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=1,  # Lightning's own rows: there are none, the callbacks write them
        deterministic=cfg.deterministic,
        logger=loggers,
        callbacks=callbacks,
        # LightningEnvironment: one process, whatever a cluster's variables say
        plugins=[AtomicCheckpointIO(), LightningEnvironment()],
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
