"""A run's folder: made, held by one process at a time, and never left with half a file."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from training.errors import ConfigError


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """The folder belongs to this process until the context ends, or the process does.

    Raises:
        ConfigError: it cannot be made or written, or another process holds it.
    """
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise ConfigError(
            f"the run folder {folder} is in use by another run; give another hydra.run.dir"
        ) from None
    except OSError as error:
        raise ConfigError(unusable(folder, error)) from error
    try:
        yield
    finally:
        with suppress(OSError):
            (folder / ".lock").unlink()
        lock.release()


def unusable(folder: object, error: OSError) -> str:
    """One sentence for a run folder that the system refuses."""
    return (
        f"the run folder {folder} cannot be written ({error.strerror}); "
        "give another output_dir or hydra.run.dir"
    )


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path``, which takes its place when the context ends well and is
    removed when not: the file under its own name is whole or not there."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
