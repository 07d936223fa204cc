"""One trial of a length, in this process: the training step of ``train.py`` at batch 1.

    python -m training.probe

reads one job from its standard input (a line of JSON: ``config``, a composed config of train.py as
a file, ``seq_len``, ``steps``, ``limit_s``, ``cap_bytes``), trains, and writes a line of JSON for
each step and one for the result, with the keys of ``training.longest_search.Probe``.
"""

import os
import time
import traceback
from collections.abc import Iterator
from typing import Any

# A length near the limit needs what is free in one piece.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import lightning as L
import psutil
import torch
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Checkpoint
from omegaconf import DictConfig, OmegaConf

from data.errors import DataError
from models.lit_gpt import LitGPT
from training import cli as _resolvers  # noqa: F401  # those that a config refers to
from training import memory, out_of_memory
from training.batching import BatchPlan
from training.build import build_model, build_trainer, tokens_without_corpus, vocab_size
from training.console import quiet
from training.devices import Hardware, check_offload, resolve_hardware
from training.errors import ConfigError
from training.probe_process import Tell, take_job
from training.report import first_line
from training.throughput import synchronize
from training.units import in_gib

WARMUP_STEPS, WARMUP_TOKENS = 3, 128  # float16's loss scale may need more than one step to settle
LONG_STEP_S = 20.0  # seconds: what a step does for the first time is little beside these


def main() -> None:
    job, tell = take_job()
    tell(**run(job, tell))
    os._exit(0)  # at once: taking a CUDA process down in good order takes a second


def run(job: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Train as the job says; the result, whatever happens."""
    result = {"seq_len": job["seq_len"], "cap_bytes": job["cap_bytes"], "limit_s": job["limit_s"]}
    watch = StepWatch(tell)
    try:
        cfg = _config(job)
        hardware = resolve_hardware(cfg.device, cfg.precision)
        device = torch.device(hardware.device)
        check_offload(cfg.model.get("offload_checkpoints", False), hardware)
        result |= {"device": hardware.device, "device_name": hardware.name}
        result["capacity_bytes"] = limit_memory(device, job["cap_bytes"])
        _train(cfg, hardware, watch, job["cap_bytes"])
    except (ConfigError, DataError) as error:
        return {**result, "status": "refused", "message": str(error)}
    except Exception as error:
        if not memory.is_out_of_memory(error):
            traceback.print_exc()
            message = f"{type(error).__name__}: {first_line(str(error))}"
            return {**result, "status": "error", "message": message}
        known = watch.oom or out_of_memory.describe(error, device)
        return {**result, "status": "oom", "message": first_line(str(error)), **known}
    peaks = memory.peaks(device)
    result["allocated_bytes"] = peaks.get("allocated") or peaks["rss"]
    result["reserved_bytes"] = peaks.get("reserved") or peaks["rss"]
    result["seconds_per_step"] = watch.seconds[-1]
    if device.type == "cpu" and job["cap_bytes"] and peaks["rss"] > job["cap_bytes"]:
        message = f"the process had {in_gib(peaks['rss'])} GiB resident, more than the cap"
        return {**result, "status": "oom", "message": message}
    return {**result, "status": "ok"}


def limit_memory(device: torch.device, cap_bytes: int | None) -> int:
    """Let PyTorch's allocator have ``cap_bytes`` at most; return the bytes there are to allocate.

    On a GPU the CUDA context and libraries come on top of the cap, where a real card of that size
    has to hold them too. On a CPU nothing is limited: the peak is compared with the cap afterwards.

    Raises:
        ConfigError: the device has less than the cap.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
    else:
        free, total = psutil.virtual_memory().available, psutil.virtual_memory().total
    if cap_bytes is None:
        return free
    if cap_bytes > total:
        raise ConfigError(
            f"a cap of {in_gib(cap_bytes)} GiB is more than the {in_gib(total)} GiB of this device"
        )
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(cap_bytes / total)
    return cap_bytes


def _config(job: dict[str, Any]) -> DictConfig:
    cfg = OmegaConf.load(job["config"])
    cfg.seq_len = cfg.global_batch_tokens = cfg.micro_batch_tokens = job["seq_len"]
    cfg.max_steps = WARMUP_STEPS + job["steps"]
    return cfg


def _train(cfg: DictConfig, hardware: Hardware, watch: "StepWatch", cap_bytes: int | None) -> None:
    settings = OmegaConf.to_container(cfg.model, resolve=True)
    settings["vocab_size"] = vocab_size(cfg.model.get("vocab_size"), tokens_without_corpus(cfg))
    quiet()
    L.seed_everything(cfg.seed, verbose=False)
    batch = BatchPlan(cfg.seq_len, micro_batch_size=1, accumulate=1)
    trainer = build_trainer(cfg, hardware, batch, [], [watch])
    with trainer.init_module():  # on the device at once: a host takes long to fill large weights
        model = build_model(cfg, settings, instantiate(cfg.attention))
    if hardware.device == "cpu":
        _check_ram(model, cfg.seq_len, trainer, cap_bytes)
    # A compiled model is compiled for each length, so its warm-up has the length that is tried.
    warmup = cfg.seq_len if cfg.compile else min(cfg.seq_len, WARMUP_TOKENS)
    lengths = [warmup] * WARMUP_STEPS + [cfg.seq_len] * (cfg.max_steps - WARMUP_STEPS)
    trainer.fit(model, Batches(lengths, settings["vocab_size"]))


def _check_ram(model: LitGPT, seq_len: int, trainer: L.Trainer, cap_bytes: int | None) -> None:
    """Refuse what RAM cannot hold before it is tried: the system would kill some process.

    Raises:
        MemoryError: what is saved for backward alone is too much.
    """
    saved = memory.saved_for_backward(
        model.model,
        torch.zeros(1, seq_len + 1, dtype=torch.int64),
        loss_fn=model.loss_fn,
        precision=trainer.precision_plugin.forward_context(),
    )
    memory.check_fits_in_ram(saved, seq_len)
    if cap_bytes is not None and saved.total > cap_bytes:
        raise MemoryError(
            f"{in_gib(saved.total)} GiB kept for backward are more than the cap alone"
        )


class Batches:
    """Random tokens, one sequence a batch: what they say changes neither memory nor time."""

    def __init__(self, lengths: list[int], vocab_size: int) -> None:
        self.lengths = lengths
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for n in self.lengths:
            yield {"tokens": torch.randint(self.vocab_size, (1, n + 1))}


class StepWatch(Checkpoint):
    """Times steps and keeps what an out-of-memory was about. A ``Checkpoint`` that keeps none, so
    that the Trainer adds none of its own.

    The first ``WARMUP_STEPS`` are on few tokens: they compile kernels and make gradients and the
    optimizer's state, so that the next one meets all the memory that a step of a long run meets.
    From there on peaks and times count. A step of more than ``LONG_STEP_S`` seconds is the last.

    Attributes:
        seconds: of each step after the warm-up.
        oom: what ``training.out_of_memory.describe`` says, if memory ran out.
    """

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self.seconds: list[float] = []
        self.oom: dict[str, Any] = {}

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module, batch: Any, batch_idx: int
    ) -> None:
        synchronize(pl_module.device)
        if batch_idx == WARMUP_STEPS:
            memory.reset_peaks(pl_module.device)
        if batch_idx >= WARMUP_STEPS:
            self.tell(event="step", number=batch_idx - WARMUP_STEPS + 1)
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx < WARMUP_STEPS:
            return
        synchronize(pl_module.device)
        self.seconds.append(time.perf_counter() - self._started)
        if self.seconds[-1] > LONG_STEP_S:
            trainer.should_stop = True

    def on_exception(self, trainer: L.Trainer, pl_module, exception: BaseException) -> None:
        if memory.is_out_of_memory(exception):  # now: the Trainer goes on to free the model
            self.oom = out_of_memory.describe(exception, pl_module.device)


if __name__ == "__main__":
    main()
