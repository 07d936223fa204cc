"""Trains a GPT with the attention chosen in the config. `python train.py --help` says how."""

import sys
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from training.cli import launch


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(cfg: DictConfig) -> dict[str, Any]:
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        from training.sweep import run_job

        return run_job(cfg, HydraConfig.get())
    summary = run(cfg)
    if summary["exit_code"]:
        sys.exit(summary["exit_code"])
    return summary


def run(cfg: DictConfig) -> dict[str, Any]:
    """One run in this process. Returns what summary.json holds; failures are a status in it."""
    # Imported here: PyTorch takes seconds that --help and a misspelt key need not wait for.
    from hydra.utils import instantiate
    from lightning import seed_everything

    from training.batching import plan_batch
    from training.build import build_callbacks, build_data, build_model, build_trainer, essentials
    from training.checks import check_config
    from training.console import quiet
    from training.devices import check_offload, resolve_hardware
    from training.loggers import make_loggers, wandb_id
    from training.memory_warning import warn_if_too_large
    from training.resume import check_same_run, find_checkpoint
    from training.sample import print_sample
    from training.summary import RunSummary, announce

    quiet()
    with RunSummary(cfg.run_dir) as summary:
        check_config(cfg)
        hardware = resolve_hardware(cfg.device, cfg.precision)
        check_offload(cfg.model.get("offload_checkpoints", False), hardware)
        batch = plan_batch(cfg.seq_len, cfg.global_batch_tokens, cfg.micro_batch_tokens)
        summary.describe(cfg, hardware, batch)
        resumed = find_checkpoint(cfg)
        if resumed:
            summary.start_step = resumed.step
            if resumed.step >= cfg.max_steps and summary.ended_well:
                return summary.keep_earlier()

        data = build_data(cfg, batch)
        about = {
            **essentials(cfg, data),
            "seq_len": batch.seq_len,
            "tokens_per_step": batch.tokens_per_step,
        }
        if resumed:
            check_same_run(resumed, about, cfg.resume)
        warn_if_too_large(cfg, hardware, about["model"]["vocab_size"])
        summary.loggers = loggers = make_loggers(cfg, resumed)

        seed_everything(cfg.seed, workers=True, verbose=False)
        attention = instantiate(cfg.attention)
        model = build_model(cfg, about["model"], attention)
        summary.update(attention=attention.name, n_params=model.model.n_params())

        callbacks = build_callbacks(cfg, {**about, "wandb_id": wandb_id(loggers)})
        trainer = build_trainer(cfg, hardware, batch, loggers, callbacks)
        summary.callbacks = callbacks
        announce(summary.values)
        trainer.fit(model, data, ckpt_path=resumed and resumed.path, weights_only=True)
        if summary.validated_step != trainer.global_step:
            trainer.validate(model, data, verbose=False)
        print_sample(trainer, data.tokenizer, cfg.sample, cfg.seed)
    return summary.values


if __name__ == "__main__":
    launch(main)
