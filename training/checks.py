"""Refuses bad settings before anything is built: one sentence with key, value and what is accepted.

What depends on the corpus is checked by data/; what the machine lacks by training/devices.py.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flash_attention.checks import MAX_HEAD_DIM
from flash_attention.tiling import BLOCK_SIZES
from models.gpt import CHECKPOINTING
from training.cli import explain_value, shown
from training.devices import DEVICES, PRECISIONS
from training.errors import ConfigError

MAX_STEPS = 10**12  # times the micro-batches of a step, it must stay a 64-bit count
WANDB_MODES = ("online", "offline", "disabled")


@dataclass(frozen=True)
class Rule:
    accepts: Callable[[Any], bool]
    accepted: str  # completes "give ..."


def integer(least: int) -> Rule:
    # type() and not isinstance: true and false are integers to Python
    return Rule(lambda v: type(v) is int and v >= least, f"an integer of at least {least}")


def number(accepts: Callable[[float], bool], accepted: str) -> Rule:
    return Rule(
        lambda v: type(v) in (int, float) and abs(v) <= sys.float_info.max and accepts(v),
        f"a number {accepted}",
    )


def one_of(*choices: str) -> Rule:
    return Rule(lambda v: v in choices, f"one of {', '.join(choices)}")


def auto_or(rule: Rule) -> Rule:
    return Rule(lambda v: v == "auto" or rule.accepts(v), f"{rule.accepted}, or auto")


def optional(rule: Rule) -> Rule:
    return Rule(lambda v: v is None or rule.accepts(v), f"{rule.accepted}, or null")


POSITIVE = number(lambda v: v > 0, "greater than 0")
AT_LEAST_ZERO = number(lambda v: v >= 0, "of at least 0")
FRACTION = number(lambda v: 0 <= v <= 1, "from 0 to 1")
BELOW_ONE = number(lambda v: 0 <= v < 1, "of at least 0 and below 1")
FLAG = Rule(lambda v: type(v) is bool, "true or false")
SEED = Rule(  # what NumPy and PyTorch both take
    lambda v: type(v) is int and 0 <= v < 2**32, "an integer from 0 to 4294967295"
)
STEPS = Rule(lambda v: type(v) is int and 1 <= v <= MAX_STEPS, f"an integer from 1 to {MAX_STEPS}")
BLOCK = Rule(
    lambda v: type(v) is int and v in BLOCK_SIZES, f"one of {', '.join(map(str, BLOCK_SIZES))}"
)
TEXT = Rule(lambda v: type(v) is str, "a text")
WORD = Rule(lambda v: type(v) is str and v != "", "a text that is not empty")
# Where null is the default that data/ refuses, saying what to give.
WORD_TO_GIVE = Rule(lambda v: v is None or WORD.accepts(v), WORD.accepted)
PART = Rule(lambda v: v is None or isinstance(v, dict), "its keys one by one, or null for none")

# A rule for a part comes before those for its keys, which null or a number would hide.
RULES = {
    "seq_len": integer(1),
    "global_batch_tokens": auto_or(integer(1)),
    "micro_batch_tokens": integer(1),
    "max_steps": STEPS,
    "seed": SEED,
    "device": one_of(*DEVICES),
    "precision": one_of(*PRECISIONS),
    "compile": FLAG,
    "deterministic": FLAG,
    "predict_memory": FLAG,
    "resume": optional(WORD),
    "output_dir": WORD,
    "run_dir": WORD,
    "sample": Rule(lambda v: isinstance(v, dict), "sample.max_new_tokens=0 for none"),
    "sample.prompt": TEXT,
    "sample.max_new_tokens": integer(0),
    # smaller ones overflow, after all the training
    "sample.temperature": number(lambda v: v == 0 or v >= 1e-3, "of at least 0.001, or 0"),
    "sample.top_k": optional(integer(1)),
    "sweep.rerun": one_of("failed", "oom", "all"),
    "attention.deterministic": FLAG,
    "attention.q_splits": auto_or(integer(1)),
    "attention.block_q": optional(BLOCK),
    "attention.block_kv": optional(BLOCK),
    "model.seq_len": integer(1),
    "model.vocab_size": optional(integer(1)),
    "model.n_layer": integer(1),
    "model.n_head": integer(1),
    "model.n_kv_head": optional(integer(1)),
    "model.width": integer(1),
    "model.mlp_ratio": integer(1),
    "model.dropout": BELOW_ONE,
    "model.positions": one_of("rotary", "learned"),
    "model.rope_base": POSITIVE,
    "model.bias": FLAG,
    "model.activation_checkpointing": one_of(*CHECKPOINTING),
    "model.offload_checkpoints": FLAG,
    "loss.chunk_tokens": auto_or(integer(1)),
    "data.corpus": Rule(lambda v: isinstance(v, dict), "data=pysource, text_files, hub or recall"),
    "data.corpus._partial_": Rule(lambda v: v is True, "true"),
    "data.seq_len": integer(1),
    "data.seed": SEED,
    "data.val_fraction": number(lambda v: 0 < v < 1, "between 0 and 1"),
    "data.val_tokens": optional(integer(1)),
    "data.cache_dir": optional(WORD),
    "data.num_workers": integer(0),
    "data.files": Rule(
        lambda v: v is None or all(map(WORD.accepts, v if isinstance(v, list) else [v])),
        "a text or a list of texts",
    ),
    "data.path": WORD_TO_GIVE,
    "data.config": optional(WORD),
    "data.split": WORD,
    "data.text_column": WORD,
    "data.max_documents": optional(integer(1)),
    "data.streaming": FLAG,
    "data.lag": integer(2),
    "data.symbols": integer(2),
    "data.block": integer(1),
    "data.n_tokens": integer(1),
    "data.stream_seed": integer(0),
    "tokenizer.vocab_size": integer(257),  # the bytes and the end of text
    "tokenizer.name": WORD_TO_GIVE,
    "tokenizer.eot_token": WORD,
    "optim.lr": POSITIVE,
    "optim.min_lr_ratio": FRACTION,
    "optim.betas": Rule(
        lambda v: isinstance(v, list) and len(v) == 2 and all(map(BELOW_ONE.accepts, v)),
        "two numbers of at least 0 and below 1, like [0.9,0.95]",
    ),
    "optim.eps": POSITIVE,
    "optim.weight_decay": AT_LEAST_ZERO,
    "optim.warmup_steps": integer(0),
    "optim.grad_clip": optional(AT_LEAST_ZERO),
    "optim.max_steps": STEPS,
    "trainer.log_every_n_steps": integer(1),
    "trainer.val_every_n_steps": integer(1),
    "trainer.float32_matmul_precision": one_of("highest", "high", "medium"),
    "logger.wandb": PART,
    "logger.wandb.project": WORD,
    "logger.wandb.name": optional(WORD),
    "logger.wandb.mode": one_of("auto", "online", "offline"),
    **{
        f"callbacks.{name}": PART
        for name in (
            "metrics",
            "divergence",
            "validation",
            "loss_by_position",
            "recall",
            "progress",
            "checkpoint",
            "random_state",
        )
    },
    "callbacks.metrics.log_every_n_steps": integer(1),
    "callbacks.metrics.warmup_steps": integer(0),
    "callbacks.divergence.every_n_steps": integer(1),
    "callbacks.loss_by_position.folder": WORD,
    "callbacks.loss_by_position.first": integer(1),
    "callbacks.checkpoint.folder": WORD,
    "callbacks.checkpoint.every_n_steps": integer(1),
}

# Keys that only pass a root key on, to be changed there alone.
ROOT_OF = {"model.seq_len": "seq_len", "data.seq_len": "seq_len", "data.seed": "seed"}


def check_config(cfg: DictConfig) -> None:
    """Raises ConfigError for the first setting that no run can use."""
    values = resolve(cfg)
    for key, rule in RULES.items():
        found, value = _lookup(values, key)
        if found and not rule.accepts(value):
            raise ConfigError(f"{key}={shown(value)} is not accepted; give {rule.accepted}")
    check_targets(values)
    check_derived(values)
    check_heads(values["model"])
    check_checkpoints(values["model"])
    if values["logger"]["wandb"]:
        check_wandb_mode()


def resolve(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain containers, every reference worked out.

    Raises:
        ConfigError: a value is missing (``???``) or refers to a key that does not exist.
    """
    try:
        return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(explain_value(error)) from None


def check_targets(node: dict[str, Any], prefix: str = "") -> None:
    """Every ``_target_`` names a class."""
    for key, value in node.items():
        if key == "_target_" and not WORD.accepts(value):
            raise ConfigError(
                f"{prefix}_target_={shown(value)} is not accepted; give the dotted path of a class"
            )
        if isinstance(value, dict):
            check_targets(value, f"{prefix}{key}.")


def check_derived(values: dict[str, Any]) -> None:
    """Keys that pass a root key on have its value."""
    for key, root in ROOT_OF.items():
        found, value = _lookup(values, key)
        if found and value != values[root]:
            raise ConfigError(
                f"{key}={shown(value)} differs from {root}={shown(values[root])}; set {root} only"
            )


def check_wandb_mode() -> None:
    """The environment variable that W&B reads."""
    mode = os.environ.get("WANDB_MODE")
    if mode and mode not in WANDB_MODES:
        raise ConfigError(
            f"WANDB_MODE={mode} is not accepted; give one of {', '.join(WANDB_MODES)}"
        )


def check_heads(model: dict[str, Any]) -> None:
    """Widths and head counts that fit together."""
    if not {"width", "n_head"} <= model.keys():
        return  # another model than models.gpt.GPT
    width, n_head = model["width"], model["n_head"]
    n_kv_head = model.get("n_kv_head") or n_head
    if width % n_head:
        raise ConfigError(
            f"model.n_head={n_head} does not divide model.width={width}; give a divisor of {width}"
        )
    if n_head % n_kv_head:
        raise ConfigError(
            f"model.n_kv_head={n_kv_head} does not divide model.n_head={n_head}; "
            f"give a divisor of {n_head}, or null"
        )
    head_dim = width // n_head
    if head_dim > MAX_HEAD_DIM:
        raise ConfigError(
            f"model.width={width} over model.n_head={n_head} makes heads of {head_dim} channels; "
            f"give heads of at most {MAX_HEAD_DIM}"
        )
    if model.get("positions") == "rotary" and head_dim % 2:
        raise ConfigError(
            f"model.width={width} over model.n_head={n_head} makes heads of {head_dim} channels; "
            "give an even number of channels for model.positions=rotary"
        )


def check_checkpoints(model: dict[str, Any]) -> None:
    """There is something to move to the host."""
    if model.get("offload_checkpoints") and model.get("activation_checkpointing") == "none":
        raise ConfigError(
            "model.offload_checkpoints=true moves checkpoints, and there are none; give "
            "model.activation_checkpointing=block, or model.offload_checkpoints=false"
        )


def _lookup(values: dict[str, Any], key: str) -> tuple[bool, Any]:
    """Whether the dotted key exists, and its value. A part switched off by null has no keys."""
    node: Any = values
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return False, None
        node = node[part]
    return True, node
