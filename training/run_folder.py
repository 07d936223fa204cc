"""A run's folder: made, held by one process at a time, and never left with half a file."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from training.errors import ConfigError

OPTION = "output_dir or hydra.run.dir"  # what gives the folder of train.py


@contextmanager
def held(folder: Path, option: str = OPTION) -> Iterator[None]:
    """The folder, given by ``option``, belongs to this process until the context ends, or the
    process does.

    Raises:
        ConfigError: it cannot be made or written, or another process holds it.
    """
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise ConfigError(
            f"the run folder {folder} is in use by another run; give another {option}"
        ) from None
    except OSError as error:
        raise ConfigError(unusable(folder, error, option)) from error
    try:
        yield
    finally:
        with suppress(OSError):
            (folder / ".lock").unlink()
        lock.release()


def unusable(folder: object, error: OSError, option: str = OPTION) -> str:
    """One sentence for a run folder that the system refuses."""
    return f"the run folder {folder} cannot be written ({error.strerror}); give another {option}"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path``, which takes its place when the context ends well and is
    removed when not: the file under its own name is whole or not there."""
    partial = _partial(path)
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def check_replacing(path: Path) -> None:
    """Whether :func:`replacing` can write ``path``; makes missing folders.

    Raises:
        OSError: it cannot.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    _partial(path).touch()
    _partial(path).unlink()


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")
