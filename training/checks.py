"""Refuses bad settings before anything is built: one sentence with key, value and what is accepted.

What depends on the corpus is checked by data/; device and precision by training/devices.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from training.cli import explain_value
from training.errors import ConfigError

MAX_HEAD_DIM = 256  # of the FlashAttention kernels


@dataclass(frozen=True)
class Rule:
    accepts: Callable[[Any], bool]
    accepted: str  # completes "give ..."


def integer(least: int) -> Rule:
    # type() and not isinstance: true and false are integers to Python
    return Rule(lambda v: type(v) is int and v >= least, f"an integer of at least {least}")


def number(accepts: Callable[[float], bool], accepted: str) -> Rule:
    return Rule(
        lambda v: type(v) in (int, float) and math.isfinite(v) and accepts(v),
        f"a number {accepted}",
    )


def one_of(*choices: str) -> Rule:
    return Rule(lambda v: v in choices, f"one of {', '.join(choices)}")


def optional(rule: Rule) -> Rule:
    return Rule(lambda v: v is None or rule.accepts(v), f"{rule.accepted}, or null")


POSITIVE = number(lambda v: v > 0, "greater than 0")
AT_LEAST_ZERO = number(lambda v: v >= 0, "of at least 0")
FRACTION = number(lambda v: 0 <= v <= 1, "from 0 to 1")
BELOW_ONE = number(lambda v: 0 <= v < 1, "of at least 0 and below 1")
FLAG = Rule(lambda v: type(v) is bool, "true or false")
TEXT = Rule(lambda v: type(v) is str, "a text")
WORD = Rule(lambda v: type(v) is str and v != "", "a text that is not empty")

RULES = {
    "seq_len": integer(1),
    "global_batch_tokens": Rule(
        lambda v: v == "auto" or integer(1).accepts(v), "an integer of at least 1, or auto"
    ),
    "micro_batch_tokens": integer(1),
    "max_steps": integer(1),
    # what NumPy and PyTorch both take
    "seed": Rule(lambda v: type(v) is int and 0 <= v < 2**32, "an integer from 0 to 4294967295"),
    "compile": FLAG,
    "deterministic": FLAG,
    "resume": optional(WORD),
    "output_dir": WORD,
    "sample.prompt": TEXT,
    "sample.max_new_tokens": integer(0),
    "sample.temperature": AT_LEAST_ZERO,
    "sample.top_k": optional(integer(1)),
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
    "trainer.log_every_n_steps": integer(1),
    "trainer.val_every_n_steps": integer(1),
    "trainer.float32_matmul_precision": one_of("highest", "high", "medium"),
    "logger.wandb.project": WORD,
    "logger.wandb.name": optional(WORD),
    "logger.wandb.mode": one_of("auto", "online", "offline"),
    "callbacks.metrics.log_every_n_steps": integer(1),
    "callbacks.metrics.warmup_steps": integer(0),
    "callbacks.divergence.every_n_steps": integer(1),
    "callbacks.checkpoint.every_n_steps": integer(1),
}


def check_config(cfg: DictConfig) -> None:
    """Raises ConfigError for the first setting that no run can use."""
    values = resolve(cfg)
    for key, rule in RULES.items():
        found, value = _lookup(values, key)
        if found and not rule.accepts(value):
            raise ConfigError(f"{key}={_shown(value)} is not accepted; give {rule.accepted}")
    check_heads(values["model"])


def resolve(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain containers, every reference worked out.

    Raises:
        ConfigError: a value is missing (``???``) or refers to a key that does not exist.
    """
    try:
        return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(explain_value(error)) from None


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


def _lookup(values: dict[str, Any], key: str) -> tuple[bool, Any]:
    """Whether the dotted key exists, and its value. A part switched off by null has no keys."""
    node: Any = values
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return False, None
        node = node[part]
    return True, node


def _shown(value: Any) -> str:
    """The value as one types it on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if type(value) is bool else str(value)
