"""Corpora: where the documents come from.

Each has `name`, `fingerprint()` (cheap: no document is read) and `load() -> datasets.Dataset` with
a "text" column, one row a document. Constructors only store: `load()` and `fingerprint()` raise
DataError for what the user must mend. `datasets` is imported when first needed, because a run
whose tokens are cached never needs it and the import takes seconds.
"""

import glob
import os
import platform
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.progress import track

from data.cache import fingerprint
from data.errors import DataError, first_line

if TYPE_CHECKING:
    from datasets import Dataset

T = TypeVar("T")


class PySource:
    """The Python files of the standard library this Python carries, without its tests.

    About 12 MB in 700 files. Always there, but its text differs between Python versions.
    """

    name = "pysource"
    left_out = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})

    def fingerprint(self) -> str:
        return fingerprint(
            corpus=self.name, python=platform.python_version(), files=_stats(self._paths())
        )

    def load(self) -> "Dataset":
        return _lazy_files(self._paths(), _read_source)

    def _paths(self) -> list[str]:
        root = sysconfig.get_path("stdlib")
        paths = []
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in self.left_out]
            paths += [os.path.join(folder, name) for name in names if name.endswith(".py")]
        if not paths:
            raise DataError(
                f"data=pysource finds no Python file under {root!r}; "
                "use data=text_files data.files='my/dir/**/*.txt' instead"
            )
        return sorted(paths)


class TextFiles:
    """UTF-8 text files, one document each.

    files: a glob or several, where ** matches any depth of folders and ~ is your home folder;
    relative to the folder the command is typed in. Line ends become \\n, a byte-order mark is left
    out. Raises DataError when nothing matches or a file is not UTF-8.
    """

    name = "text_files"

    def __init__(self, files: str | Sequence[str] | None):
        self.files = files

    def fingerprint(self) -> str:
        return fingerprint(corpus=self.name, files=_stats(self._paths()))

    def load(self) -> "Dataset":
        return _lazy_files(self._paths(), _read_utf8)

    def _paths(self) -> list[str]:
        if not self.files:
            raise DataError("data.files is not set; give a glob, e.g. data.files='my/dir/**/*.txt'")
        patterns = [self.files] if isinstance(self.files, str) else list(self.files)
        paths = set()
        for pattern in patterns:
            full = os.path.abspath(os.path.expanduser(pattern))
            # The name itself first, so that a file called "notes[1].txt" is found.
            matches = [full] if os.path.exists(full) else glob.glob(full, recursive=True)
            files = [match for match in matches if os.path.isfile(match)]
            if not files and os.path.isdir(full):
                raise DataError(
                    f"data.files={pattern!r} is a folder; "
                    f"give a glob of files in it, e.g. {os.path.join(pattern, '**/*.txt')!r}"
                )
            if not files:
                raise DataError(
                    f"data.files={pattern!r} matches no file (looked for {full!r}); "
                    "give a glob that matches at least one UTF-8 text file"
                )
            paths.update(files)
        return sorted(paths)


class Hub:
    """A data set of the Hugging Face Hub, or a local folder that `datasets.load_dataset` reads.

    path: "owner/name"; config: its configuration or None; split: e.g. "train" or "train[:1%]";
    text_column: the column that holds the text; max_documents: only the first so many, or None;
    streaming: download no more than those (needs max_documents).
    """

    name = "hub"

    def __init__(
        self,
        path: str | None,
        config: str | None,
        split: str,
        text_column: str,
        streaming: bool,
        max_documents: int | None,
    ):
        self.path = path
        self.config = config
        self.split = split
        self.text_column = text_column
        self.streaming = streaming
        self.max_documents = max_documents

    def fingerprint(self) -> str:
        self._check()
        local = glob.glob(os.path.join(self._where, "**"), recursive=True)
        return fingerprint(
            corpus=self.name,
            path=self.path,
            config=self.config,
            split=self.split,
            text_column=self.text_column,
            max_documents=self.max_documents,
            files=_stats(sorted(filter(os.path.isfile, local))),
        )

    def load(self) -> "Dataset":
        self._check()
        try:
            rows = self._rows()
        except Exception as error:  # datasets raises dozens of kinds; all mean "not loaded"
            raise DataError(
                f"data.path={self.path!r} (data.config={self.config!r}, data.split={self.split!r}) "
                f"could not be loaded: {first_line(error)}"
            ) from error
        column = rows.features.get(self.text_column)
        if getattr(column, "dtype", None) not in ("string", "large_string"):
            raise DataError(
                f"data.text_column={self.text_column!r} is not a text column of {self.path!r}; "
                f"its columns are {', '.join(rows.column_names)}"
            )
        rows = rows.select_columns([self.text_column])
        if self.text_column != "text":
            rows = rows.rename_column(self.text_column, "text")
        return rows

    def _rows(self) -> "Dataset":
        from datasets import Dataset, load_dataset

        rows = load_dataset(self._where, self.config, split=self.split, streaming=self.streaming)
        if self.streaming:
            first = islice(rows, self.max_documents)
            return Dataset.from_list(
                list(progress(first, "Downloading documents", total=self.max_documents))
            )
        if self.max_documents is not None:
            return rows.select(range(min(self.max_documents, len(rows))))
        return rows

    @property
    def _where(self) -> str:
        return os.path.expanduser(self.path)

    def _check(self) -> None:
        if not self.path:
            raise DataError("data.path is not set; give a Hub data set, e.g. data.path=owner/name")
        if not self.split:
            raise DataError("data.split is not set; give a name, e.g. data.split=train")
        if self.max_documents is not None and not (
            isinstance(self.max_documents, int) and self.max_documents >= 1
        ):
            raise DataError(
                f"data.max_documents={self.max_documents!r} is not accepted; "
                "give an integer of at least 1, or null"
            )
        if self.streaming and self.max_documents is None:
            raise DataError(
                "data.streaming=true reads only the first data.max_documents documents; "
                "give data.max_documents a number, or set data.streaming=false"
            )


def progress(items: Iterable[T], what: str, total: int | None = None) -> Iterable[T]:
    """The items, with a progress bar on stderr where that is a terminal.

    total: how many there are, where ``len(items)`` does not say.
    """
    console = Console(stderr=True)
    return track(
        items,
        description=what,
        total=total,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _stats(paths: list[str]) -> list:
    """What changes when a file changes: path, size in bytes, time of change in ns."""
    return [[path, os.stat(path).st_size, os.stat(path).st_mtime_ns] for path in paths]


def _lazy_files(paths: list[str], read: Callable[[str], str]) -> "Dataset":
    """One row a file, read when its row is asked for, so that a corpus may exceed the memory.

    Empty files are left out: one could be all of a small validation split.
    """
    from datasets import Dataset

    paths = [path for path in paths if os.path.getsize(path) > 0]

    def read_rows(rows: dict) -> dict:
        return {"text": [read(path) for path in rows["path"]]}

    return Dataset.from_dict({"path": paths}).with_transform(read_rows)


def _read_source(path: str) -> str:
    """A Python file in the encoding it declares; "" when it does not keep to it."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return ""


def _read_utf8(path: str) -> str:
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise DataError(
            f"data.files: {path!r} is not UTF-8 (byte {error.start}); "
            "convert it or give a glob that leaves it out"
        ) from error
    except OSError as error:
        raise DataError(f"data.files: {path!r} cannot be read ({error.strerror})") from error
