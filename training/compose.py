"""The config of train.py outside of a run: the same overrides, lists of values too."""

from itertools import product

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from training.checks import check_config
from training.cli import CONFIGS, check_overrides


def combinations(overrides: list[str]) -> list[list[str]]:
    """The overrides of each job of a sweep: ``["a=1,2"]`` -> ``[["a=1"], ["a=2"]]``.

    Raises:
        ConfigError, HydraException: as train.py would.
    """
    check_overrides(overrides)
    choices = []
    for override in OverridesParser.create().parse_overrides(overrides):
        if override.is_sweep_override():
            key = override.get_key_element()
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([override.input_line])
    return [list(job) for job in product(*choices)]


def distinctions(jobs: list[list[str]]) -> list[str]:
    """What tells each combination from the others."""
    shared = set(jobs[0]).intersection(*jobs)
    return [" ".join(o for o in job if o not in shared) for job in jobs]


def composed(overrides: list[str]) -> DictConfig:
    """The config of a run with these overrides, checked. It has no folder.

    Raises:
        ConfigError, HydraException, OmegaConfBaseException: as train.py would.
    """
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = compose("train", [*overrides, "run_dir=none"])
    check_config(cfg)
    return cfg
