"""The command line: one readable line for whatever is wrong with it, and the text of --help."""

import difflib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, QuotedString
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

from training.errors import EXIT_INTERRUPTED, ConfigError, fail, output_closed
from training.run_folder import unusable

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
REFUSED = (HydraException, OmegaConfBaseException, ConfigError)
FOLDER_NAME_LENGTH = 100  # of the changes in a job's folder
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
        check_overrides(sys.argv[1:])
        main()
    except REFUSED as error:
        if full_traceback_wanted():
            raise
        fail(explain(error))
    except KeyboardInterrupt:  # a run that has begun says so itself (training/summary.py)
        if full_traceback_wanted():
            raise
        print("interrupted before the run began", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        sys.exit(output_closed())
    except OSError as error:  # Hydra makes the run folder, and writes its config there
        if full_traceback_wanted():
            raise
        fail(unusable(error.filename, error))


@contextmanager
def one_sentence(*more: type[Exception], about: str = "") -> Iterator[None]:
    """What is wrong with a setting, here or of the types in ``more``, ends the program with one
    line that begins with ``about``, and exit code 2."""
    try:
        yield
    except (*REFUSED, *more) as error:
        fail(f"{about}{explain(error)}")


# --- what Hydra would take, or refuse with a traceback -----------------------------------------


def check_overrides(arguments: list[str]) -> None:
    """Refuses choices that are no name, keys that the configs lack, and keys taken away.

    Hydra adds any key that has a ``+``. Here only a part of the user's own may have more keys than
    the configs (``+attention.window=64`` beside ``attention._target_=...``), and so may config
    files of the user's own; only callbacks may be taken away.

    Raises:
        ConfigError: for the first of them.
    """
    overrides = _parsed(arguments)
    for override in overrides:
        key = override.key_or_group
        if not key:
            raise ConfigError(f"{override.input_line} names no key; give key=value")
        if override.is_delete():
            _check_deletion(key)
        elif _is_group(key) and override.package is None:
            _check_choice(override)
    if not any(re.match(r"--config-dir|-cd|\+*hydra\.searchpath", a) for a in arguments):
        _check_additions(overrides)


def _parsed(arguments: list[str]) -> list[Override]:
    """The overrides among the arguments; Hydra itself refuses those that cannot be read."""
    parser = OverridesParser.create()
    overrides = []
    for argument in arguments:
        try:
            overrides.append(parser.parse_override(argument))
        except HydraException:  # also an option like -m, or its value
            continue
    return overrides


def _given_keys(override: Override) -> Iterator[str]:
    """The keys an override sets: those inside of ``key={a: 1}`` too."""
    key, value = override.package or override.key_or_group, override.value()
    yield key
    if isinstance(value, dict):
        yield from _dotted(OmegaConf.create(value), f"{key}.")


def _root(key: str) -> str:
    return re.split(r"[./@]", key)[0]


def _is_group(key: str) -> bool:
    return key.startswith("hydra/") or (CONFIGS / key).is_dir()


def _check_choice(override: Override) -> None:
    group, value = override.key_or_group, override.value()
    if isinstance(value, Glob):
        return
    typed = override.input_line.split("=", 1)[1]
    swept = isinstance(value, ChoiceSweep)
    for choice in value.list if swept else [value]:
        if not isinstance(choice, str | QuotedString) or choice == "":
            listed = _choices(group)
            accepted = f"one of {', '.join(listed)}" if listed else "a name"
            text = shown(choice) if swept else typed
            raise ConfigError(f"{group}={text} is no choice; give {accepted}")


def _check_deletion(key: str) -> None:
    if _root(key) != "hydra" and not re.fullmatch(r"callbacks\.\w+", key):
        raise ConfigError(
            f"~{key} takes away what a run needs; "
            "give an entry of callbacks, like ~callbacks.progress, or leave it out"
        )


def _check_additions(overrides: list[Override]) -> None:
    own = {_root(k) for o in overrides for k in _given_keys(o) if k.endswith("._target_")}
    adding = [
        override
        for override in overrides
        if (override.is_add() or override.is_force_add() or isinstance(override.value(), dict))
        and _root(override.key_or_group) not in own | {"hydra"}
        and not (_is_group(override.key_or_group) and override.package is None)
    ]
    known = _known_keys() if adding else []  # composes the config: a third of a second
    for override in adding:
        for key in _given_keys(override):
            if key not in known:
                raise ConfigError(unknown_key(key))


def _choices(group: str) -> list[str]:
    return sorted(file.stem for file in (CONFIGS / group).glob("*.yaml") if file.stem != "base")


# --- errors in one sentence --------------------------------------------------------------------


def explain(error: Exception) -> str:
    """One sentence for an error of Hydra or OmegaConf: the key, and what would be accepted."""
    text = str(error)
    if isinstance(error, InstantiationException):
        return _explain_instantiation(error)
    if isinstance(error, OmegaConfBaseException):
        return explain_value(error)
    if match := re.match(r"Could not override '(.+?)'", text):
        return unknown_key(match.group(1).split("@")[0])
    choices = r"Could not find '(.+)/(.*?)'\s+Available options in .+?:\n((?:\t.+\n?)*)"
    if match := re.search(choices, text):
        group, choice, known = match.groups()
        listed = ", ".join(name for name in known.split() if name != "base")
        return f"{group}={choice} is no choice; give one of {listed}"
    if isinstance(error, OverrideParseException):
        return _explain_unreadable(error.override)
    if match := re.match(
        r"(?:Ambiguous value for argument|Sweep parameters) '(.+?)'( |\n|$)", text
    ):
        key, value = match.group(1).split("=", 1)
        return (
            f"{key}={value} gives several values; add -m for a run of each, "
            f"write {key}=[{value}] for a list, or quote a text: {_quoted(key, value)}"
        )
    cause = error.__cause__
    if isinstance(error, ConfigCompositionException) and isinstance(cause, OmegaConfBaseException):
        return explain_value(cause)
    return one_line(text)


def _explain_unreadable(override: str) -> str:
    if match := re.fullmatch(r"([+~]{0,2}[\w./@-]+)=(.*)", override, re.DOTALL):
        key, value = match.groups()
        hint = f"quote the value: {_quoted(key, value)}"
    else:
        hint = "give key=value"
    return f"{one_line(override)} is not key=value as Hydra reads it; {hint}"


def _quoted(key: str, value: str) -> str:
    """An argument as typed in a shell, in quotes of Hydra's and of the shell's."""
    value = value.replace("'", "\\'")
    argument = f"{key}='{value}'"
    return shlex.quote(argument) if re.search(r'["$`!]', argument) else f'"{argument}"'


def shown(value: Any) -> str:
    """A value as one types it on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if type(value) is bool else str(value)


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
        lines.append(f"  {group.name:<12}{', '.join(_choices(group.name))}")
    return "\n".join(lines)


def folder_name(text: object) -> str:
    """A command line's changes as a folder name: no separators, at most 100 characters. A change
    that does not fit is left out whole, as half a value would be another one; only a first one of
    that length is cut."""
    name = re.sub(r"[^\w.,=+-]+", "-", str(text))
    if len(name) <= FOLDER_NAME_LENGTH:
        return name
    room = FOLDER_NAME_LENGTH - len(",more")
    ends = [comma.start() for comma in re.finditer(r",(?=[\w.+]+=)", name)]
    return f"{name[: max((end for end in ends if end <= room), default=room)]},more"


def lr_for_width(width: object) -> float:
    """The default learning rate; see configs/optim/adamw.yaml."""
    # A width that is no width is refused under its own name, not here.
    return 0.4 / width if isinstance(width, int) and width > 0 else 1.0


OmegaConf.register_new_resolver("lr_for_width", lr_for_width, replace=True)
OmegaConf.register_new_resolver("root_keys", root_keys, replace=True)
OmegaConf.register_new_resolver("config_groups", config_groups, replace=True)
OmegaConf.register_new_resolver("folder_name", folder_name, replace=True)
