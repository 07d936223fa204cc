"""Folders that are built once and then only read."""

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from data.errors import DataError

LEFTOVER_AGE = 24 * 3600  # seconds after which nobody builds in a temporary folder any more


def fingerprint(**facts) -> str:
    """16 hex digits that change when any of the JSON-able `facts` changes."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, filled by `build(temporary_folder)` when it does not exist yet.

    The temporary folder is renamed when it is whole, so a killed process leaves no half-built
    `folder`. Of several processes that build at once, the first to finish wins and the others take
    its folder. Raises DataError when the cache cannot be written, a full disk included; an OSError
    of a file elsewhere, which `build` reads, stays as it is.
    """
    # os.path, because Path.is_dir raises below a folder without permission; mkdir then says why.
    if os.path.isdir(folder):
        return folder
    temporary = folder.with_name(f"tmp-{folder.name}-{uuid.uuid4().hex[:8]}")
    try:
        temporary.mkdir(parents=True)
        _remove_leftovers(folder)
        build(temporary)
        try:
            os.rename(temporary, folder)
        except OSError:  # a folder that is not empty is never replaced: somebody else was first
            if not os.path.isdir(folder):
                raise
    except OSError as error:
        if not _is_of(folder.parent, error):
            raise
        raise DataError(
            f"data.cache_dir={str(folder.parent)!r} cannot be written "
            f"({error.strerror or error}); give a folder you can write to, with enough free space"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _is_of(cache: Path, error: OSError) -> bool:
    """Whether the error is of a file in the cache or, as when a write fails, names no file."""
    if not isinstance(error.filename, str | os.PathLike):
        return True
    path, cache = os.path.abspath(error.filename), os.path.abspath(cache)
    # A parent of the cache counts too: the one that could not be made.
    return os.path.commonpath([path, cache]) in (path, cache)


def _remove_leftovers(folder: Path) -> None:
    """Temporary folders of processes that were killed."""
    for leftover in folder.parent.glob(f"tmp-{folder.name}-*"):
        with suppress(FileNotFoundError):  # another process removed it first
            if time.time() - leftover.stat().st_mtime > LEFTOVER_AGE:
                shutil.rmtree(leftover, ignore_errors=True)
