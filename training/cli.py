"""The command line: one readable line for whatever is wrong with it, and the text of --help."""

import difflib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    InstantiationException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigKeyError,
    GrammarParseError,
    InterpolationKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from training.errors import ConfigError

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
EXIT_BAD_INPUT = 2
TRACEBACK = "HYDRA_FULL_ERROR"  # Hydra's own switch; users know it
OURS = "TRAIN_SET_HYDRA_FULL_ERROR"  # says that launch() set it, to a sweep's child processes too


def full_traceback_wanted() -> bool:
    """Whether the user, and not this program, has set HYDRA_FULL_ERROR=1."""
    return os.environ.get(TRACEBACK) == "1" and OURS not in os.environ


def launch(main: Callable[[], object]) -> None:
    """Calls a ``hydra.main`` function; what Hydra cannot compose becomes one line and exit code 2.

    Hydra prints such errors itself over several lines, unless asked for full errors; then it lets
    them through to here.
    """
    if not full_traceback_wanted():
        os.environ.update({TRACEBACK: "1", OURS: "1"})
    try:
        main()
    except (HydraException, OmegaConfBaseException, ConfigError) as error:
        if full_traceback_wanted():
            raise
        fail(explain(error))


def fail(message: str, code: int = EXIT_BAD_INPUT) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


def explain(error: Exception) -> str:
    """One sentence for an error of Hydra or OmegaConf: the key, and what would be accepted."""
    text = str(error)
    if isinstance(error, InstantiationException):
        return _explain_instantiation(error)
    if isinstance(error, OmegaConfBaseException):
        return explain_value(error)
    if match := re.match(r"Could not override '(.+?)'", text):
        return unknown_key(match.group(1).split("@")[0])
    choices = r"Could not find '(.+)/(.+?)'\s+Available options in .+?:\n((?:\t.+\n?)*)"
    if match := re.search(choices, text):
        group, choice, known = match.groups()
        listed = ", ".join(name for name in known.split() if name != "base")
        return f"{group}={choice} is no choice; give one of {listed}"
    if isinstance(error, OverrideParseException):
        problem = one_line(text).split(" See https", 1)[0]
        return f"{error.override} is not key=value as Hydra reads it ({problem})"
    cause = error.__cause__
    if isinstance(error, ConfigCompositionException) and isinstance(cause, OmegaConfBaseException):
        return explain_value(cause)
    return one_line(text)


def explain_value(error: OmegaConfBaseException) -> str:
    """One sentence for a value of the config that OmegaConf cannot give."""
    key = error.full_key or "a value"
    if isinstance(error, MissingMandatoryValue):
        return f"{key} is not set; give {key}=..."
    if isinstance(error, InterpolationKeyError):
        wanted = re.search(r"'(.+?)'", str(error))
        return f"{key} refers to ${{{wanted.group(1) if wanted else '?'}}}, which does not exist"
    if isinstance(error, InterpolationResolutionError):
        return f"{key} cannot be worked out: {one_line(str(error))}"
    if isinstance(error, GrammarParseError):
        return f"{key} cannot be read: {one_line(str(error))}"
    if isinstance(error, ConfigKeyError):
        return unknown_key(key)
    return f"{key}: {one_line(str(error))}"


def unknown_key(key: str) -> str:
    """Names the key that does not exist and the one most like it."""
    known = _known_keys()
    leaves = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.7) or [
        leaves[leaf]
        for leaf in difflib.get_close_matches(key.rsplit(".", 1)[-1], leaves, n=1, cutoff=0.7)
    ]
    hint = f"did you mean {close[0]}?" if close else "`python train.py --help` lists the keys"
    return f"there is no key {key}; {hint}"


def one_line(text: str) -> str:
    """The message without OmegaConf's lines about where its objects live."""
    lines = [line.strip() for line in text.splitlines()]
    noise = re.compile(r"(full_key|object_type)")
    return " ".join(line for line in lines if line and not noise.match(line))


def _known_keys() -> list[str]:
    """Every dotted key of the config, with the choices of groups made on the command line."""
    groups = [arg for arg in sys.argv[1:] if re.match(r"^[\w/]+=[\w-]+$", arg)]
    for overrides in (groups, []):
        try:
            return list(_dotted(_compose(overrides)))
        except HydraException:
            continue
    return []


def _compose(overrides: list[str]) -> DictConfig:
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return hydra.compose("train", overrides)


def _dotted(cfg: DictConfig, prefix: str = ""):
    for key in cfg:
        yield f"{prefix}{key}"
        node = cfg._get_node(key)  # as written: nothing is resolved, "???" and ${...} included
        if isinstance(node, DictConfig) and not (node._is_none() or node._is_interpolation()):
            yield from _dotted(node, f"{prefix}{key}.")


def _explain_instantiation(error: InstantiationException) -> str:
    cause = error.__cause__ or error
    key = re.search(r"full_key: (\S+)", str(error))
    return f"{key.group(1) + ': ' if key else ''}{one_line(str(cause))}"


# --- texts of --help ---------------------------------------------------------------------------


def root_keys() -> str:
    """The root keys of configs/train.yaml with their comments, as written there."""
    text = (CONFIGS / "train.yaml").read_text(encoding="utf-8")
    body = text.split("\n\n", 1)[1]  # after the defaults list
    lines = [line for line in body.splitlines() if not line.startswith("run_dir:")]
    return "\n".join(f"  {line}".rstrip() for line in lines).strip("\n")


def config_groups() -> str:
    """Each group with its choices."""
    groups = sorted(path for path in CONFIGS.iterdir() if path.is_dir() and path.name != "hydra")
    lines = []
    for group in groups:
        choices = sorted(file.stem for file in group.glob("*.yaml") if file.stem != "base")
        lines.append(f"  {group.name:<12}{', '.join(choices)}")
    return "\n".join(lines)


def folder_name(text: object) -> str:
    """A command line's changes as a folder name: no separators, at most 100 characters."""
    return re.sub(r"[^\w.,=+-]+", "-", str(text))[:100]


def lr_for_width(width: object) -> float:
    """The default learning rate; see configs/optim/adamw.yaml."""
    # A width that is no width is refused under its own name, not here.
    return 0.4 / width if isinstance(width, int) and width > 0 else 1.0


OmegaConf.register_new_resolver("lr_for_width", lr_for_width, replace=True)
OmegaConf.register_new_resolver("root_keys", root_keys, replace=True)
OmegaConf.register_new_resolver("config_groups", config_groups, replace=True)
OmegaConf.register_new_resolver("folder_name", folder_name, replace=True)
