"""Documents to flat files of tokens, once: split, tokenise, write, and open again."""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data.cache import build_once, fingerprint
from data.corpora import progress
from data.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

FORMAT = 1  # of the files below; a new number makes every cache be built anew
SPLIT_SEED = 0  # not the run's seed: runs that differ in seed validate on the same documents
BATCH = 64  # documents tokenised at a time


@dataclass(frozen=True)
class TokenSplit:
    """A flat file of tokens, an end-of-text token after each document."""

    path: Path
    dtype: str  # uint16 or uint32
    n_tokens: int
    n_documents: int
    sha256: str  # of the file: which tokens, in which order


def prepare(corpus, tokenizer, val_fraction: float, cache_dir: Path) -> Path:
    """The cache folder with the tokens of `corpus`, made when it is not there yet.

    Raises DataError when the corpus or the tokeniser cannot be used.
    """
    key = fingerprint(
        format=FORMAT,
        corpus=corpus.fingerprint(),
        tokenizer=tokenizer.fingerprint(),
        val_fraction=val_fraction,
    )

    def build(folder: Path) -> None:
        documents = corpus.load()
        if len(documents) == 0:
            raise DataError(f"data={corpus.name} has no text; give at least one document with text")
        train, val = split_documents(documents, val_fraction)
        # Printed, not logged: no log setting should make a run that is at work look stuck.
        print(
            f"Tokenising {len(documents)} documents of {corpus.name} (once) ...",
            file=sys.stderr,
            flush=True,
        )
        tokenizer.fit(texts(train, "Reading for the tokeniser"), folder)
        dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
        splits = {
            name: write_tokens(
                folder / f"{name}.bin", dtype, texts(documents, f"Tokenising {name}"), tokenizer
            )
            for name, documents in (("train", train), ("val", val))
        }
        (folder / "meta.json").write_text(json.dumps({"dtype": dtype, "splits": splits}, indent=1))

    return build_once(cache_dir / f"{corpus.name}-{key}", build)


def open_split(folder: Path, name: str) -> TokenSplit:
    """The split "train" or "val" of a folder that `prepare` made.

    Raises DataError when the file is not as long as it was written (a full or failing disk).
    """
    meta = json.loads((folder / "meta.json").read_text())
    split = TokenSplit(folder / f"{name}.bin", meta["dtype"], **meta["splits"][name])
    if split.path.stat().st_size != split.n_tokens * np.dtype(split.dtype).itemsize:
        raise DataError(f"the token cache {str(folder)!r} is damaged; delete that folder")
    return split


def split_documents(documents: "Dataset", val_fraction: float) -> tuple["Dataset", "Dataset"]:
    """Training and validation documents, at least one each, by a fixed random choice.

    Training documents keep their order, so that neighbours (files of one folder) stay neighbours.
    A single document is cut: its last part is for validation.
    """
    n = len(documents)
    if n == 1:
        return _cut(documents[0]["text"], val_fraction)
    n_val = min(max(1, round(n * val_fraction)), n - 1)
    order = np.random.default_rng(SPLIT_SEED).permutation(n)
    return documents.select(sorted(order[n_val:])), documents.select(order[:n_val])


def _cut(text: str, val_fraction: float) -> tuple["Dataset", "Dataset"]:
    from datasets import Dataset

    at = round(len(text) * (1 - val_fraction))
    return Dataset.from_dict({"text": [text[:at]]}), Dataset.from_dict({"text": [text[at:]]})


def texts(documents: "Dataset", what: str) -> Iterator[str]:
    """The documents' texts, empty ones left out, with a progress bar on a terminal."""
    for start in progress(range(0, len(documents), BATCH), what):
        yield from filter(None, documents[start : start + BATCH]["text"])


def write_tokens(path: Path, dtype: str, texts: Iterable[str], tokenizer) -> dict:
    """Write one flat file; returns its n_tokens, n_documents and sha256."""
    digest = hashlib.sha256()
    n_tokens = n_documents = 0
    with open(path, "wb") as file:
        for batch in _batches(texts):
            for ids in tokenizer.encode(batch):
                tokens = np.append(ids, tokenizer.eot).astype(dtype).tobytes()
                file.write(tokens)
                digest.update(tokens)
                n_tokens += len(ids) + 1
                n_documents += 1
    return {"n_tokens": n_tokens, "n_documents": n_documents, "sha256": digest.hexdigest()}


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch = []
    for text in texts:
        batch.append(text)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
