"""Finds the checkpoint to go on from, and refuses one of another model."""

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from training.checkpoint import NAME
from training.console import console
from training.errors import ConfigError

# May change at a resume; everything else of these groups must be as it was.
FREE = {
    "model": {"_target_", "dropout", "activation_checkpointing", "offload_checkpoints"},
    "optim": {"_target_", "max_steps", "min_lr_ratio", "warmup_steps", "grad_clip"},
}


@dataclass(frozen=True)
class Resumed:
    """A checkpoint and what it says about its run."""

    path: Path
    step: int
    about: dict[str, Any]

    @property
    def run_dir(self) -> Path:
        folder = self.path.parent
        return folder.parent if folder.name == "checkpoints" else folder


def find_checkpoint(cfg: DictConfig) -> Resumed | None:
    """The checkpoint that ``cfg.resume`` means; None to start anew.

    Raises:
        ConfigError: there is none, it cannot be read, it leaves no step to train, or a new run
            would overwrite it.
    """
    resumed = _find(cfg.resume, Path(cfg.run_dir), Path(cfg.output_dir))
    if resumed:
        if resumed.step >= cfg.max_steps and cfg.resume != "auto":
            raise ConfigError(
                f"the checkpoint {resumed.path} is at step {resumed.step} already, so that "
                f"max_steps={cfg.max_steps} leaves nothing to train; "
                f"give more than {resumed.step}"
            )
    elif cfg.resume == "auto":
        console.print(f"resume=auto: no checkpoint in {cfg.run_dir} yet, starting anew")
    return resumed


def _find(resume: str | None, run_dir: Path, output_dir: Path) -> Resumed | None:
    own = run_dir / "checkpoints" / NAME
    if resume is None:
        if own.exists():
            raise ConfigError(
                f"the run folder {run_dir} already holds a run; "
                "give resume=auto to go on with it, or another hydra.run.dir"
            )
        return None
    if resume == "auto":
        return read_header(own) if own.exists() else None
    if resume == "last":
        return read_header(_newest(output_dir))
    path = Path(resume)
    if path.is_dir():
        path = path / "checkpoints" / NAME if (path / "checkpoints").is_dir() else path / NAME
    if not path.is_file():
        raise ConfigError(
            f"resume={resume} holds no checkpoint; "
            "give a run folder, a checkpoint file, last, auto or null"
        )
    return read_header(path)


def read_header(path: Path) -> Resumed:
    """Reads what the checkpoint says about its run; the tensors stay on disk."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # compares every part with its checksum
        about = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["run"]
        resumed = Resumed(path, about["step"], about)
    except OSError as error:
        raise ConfigError(f"resume: {path} cannot be read ({error.strerror})") from error
    except Exception as error:
        raise ConfigError(
            f"resume: {path} is not a checkpoint of this program ({type(error).__name__})"
        ) from error
    if damaged:
        raise ConfigError(f"resume: {path} is damaged (checksum of {damaged}); give another")
    return resumed


def check_same_run(resumed: Resumed, about: dict[str, Any], resume: str) -> None:
    """Refuses to go on with a model, tokeniser or optimizer other than the checkpoint's.

    The attention backend may change, and so may the tokens of a step, and seq_len unless positions
    are learned; a line says so, because a resume takes its settings from the command line alone.
    With ``resume="last"`` other lengths are refused: they tell that the newest checkpoint is of
    another command, as it is when this one's run was stopped before its first. (Other data are
    refused in any case, by the datamodule.)

    Raises:
        ConfigError: names the keys that differ, with both values.
    """
    differing = []
    for group, free in FREE.items():
        was, now = resumed.about[group], about[group]
        if group == "model" and now.get("positions") == "rotary":
            free = free | {"seq_len"}
        differing += [
            f"{group}.{key} ({was.get(key)} there, {now.get(key)} here)"
            for key in sorted((was.keys() | now.keys()) - free)
            if was.get(key) != now.get(key)
        ]
    if resumed.about["tokenizer"] != about["tokenizer"]:
        differing.append("tokenizer")
    if differing:
        raise ConfigError(
            f"the checkpoint {resumed.path} differs in {', '.join(differing)}; "
            "give the same values, or resume=null"
        )
    changed = [
        f"{key}={about[key]} ({resumed.about[key]} in the checkpoint)"
        for key in ("seq_len", "tokens_per_step")
        if resumed.about[key] != about[key]
    ]
    if changed and resume == "last":
        raise ConfigError(
            f"resume=last: the newest checkpoint is {resumed.path}, of a run of another command: "
            f"this one has {' and '.join(changed)}; give resume={resumed.run_dir} to go on from it "
            "all the same, or resume=null"
        )
    console.print(f"going on from step {resumed.step} of {resumed.path}")
    if changed:
        console.print(f"note: this run goes on with {' and '.join(changed)}")


def _newest(output_dir: Path) -> Path:
    found = list(output_dir.rglob(f"checkpoints/{NAME}"))
    if not found:
        raise ConfigError(
            f"resume=last, but no run under output_dir={output_dir} has a checkpoint; "
            "give a run folder, or resume=null"
        )
    return max(found, key=lambda path: path.stat().st_mtime)
