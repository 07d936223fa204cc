"""What a data module says of a damaged cache and of a corpus without text."""

import json

import numpy as np
import pytest

import data.module
from data.errors import DataError, damaged
from data.tokenizers import BPETokenizer

DAMAGED = "the token cache '.*text_files-.*' is damaged; delete that folder$"


def overwrite(path, at):
    """One token becomes one that the vocabulary lacks; the size stays."""
    tokens = np.fromfile(path, "uint16")
    tokens[at] = 60_000
    tokens.tofile(path)


def meta_with(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_sentence_names_the_folder(tmp_path):
    assert str(damaged(tmp_path)) == f"the token cache '{tmp_path}' is damaged; delete that folder"


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda f: (f / "meta.json").write_text('{"dtype": '), id="half a meta.json"),
        pytest.param(lambda f: (f / "meta.json").write_bytes(b"\xff\0"), id="binary meta.json"),
        pytest.param(lambda f: (f / "meta.json").write_text("[]"), id="another JSON"),
        pytest.param(lambda f: meta_with(f / "meta.json", splits={}), id="no splits"),
        pytest.param(lambda f: meta_with(f / "meta.json", dtype="uint17"), id="unknown dtype"),
        pytest.param(lambda f: (f / "meta.json").unlink(), id="no meta.json"),
        pytest.param(lambda f: (f / "train.bin").unlink(), id="no train.bin"),
        pytest.param(lambda f: (f / "val.bin").unlink(), id="no val.bin"),
        pytest.param(lambda f: (f / "train.bin").write_bytes(b"x"), id="short train.bin"),
        pytest.param(lambda f: overwrite(f / "train.bin", 900), id="overwritten train.bin"),
        pytest.param(lambda f: overwrite(f / "val.bin", 100), id="overwritten val.bin"),
    ],
)
def test_a_damaged_cache_is_named(ready, damage):
    damage(ready()._folder)
    with pytest.raises(DataError, match=DAMAGED):
        ready()


def test_a_cache_without_its_tokeniser_is_named(ready):
    (ready(tokenizer=BPETokenizer(260))._folder / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=DAMAGED):
        ready(tokenizer=BPETokenizer(260))


@pytest.mark.parametrize("at", [0, 49, -50, -1])
def test_of_a_large_file_both_ends_are_looked_at(ready, monkeypatch, at):
    monkeypatch.setattr(data.module, "HASHED", 0)
    monkeypatch.setattr(data.module, "BLOCK", 50)
    overwrite(ready()._folder / "train.bin", at)
    with pytest.raises(DataError, match=DAMAGED):
        ready()


def test_a_large_file_is_not_read_whole(ready, monkeypatch):
    monkeypatch.setattr(data.module, "HASHED", 0)
    monkeypatch.setattr(data.module, "BLOCK", 50)
    overwrite(ready()._folder / "train.bin", 900)
    ready()


def test_a_cache_that_may_not_be_read_is_named(ready, monkeypatch):
    ready()

    def refuse(*args):
        raise PermissionError(13, "Permission denied", "meta.json")

    monkeypatch.setattr(data.module, "open_split", refuse)
    with pytest.raises(DataError, match=r"data\.cache_dir='.*cache' cannot be read \(Permission"):
        ready()


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf"], ids=["empty", "byte-order mark"])
@pytest.mark.parametrize("n_files", [1, 3])
def test_a_corpus_without_text_is_named(ready, tmp_path, content, n_files):
    for i in range(n_files):
        (tmp_path / f"{i}.txt").write_bytes(content)
    with pytest.raises(
        DataError, match=r"^data=text_files has no text; give at least one document"
    ):
        ready(files=str(tmp_path / "*.txt"))


def test_an_empty_split_is_not_answered_with_a_seq_len(ready, tmp_path):
    (tmp_path / "a.txt").write_text("a")  # one letter: nothing is left for validation
    with pytest.raises(DataError, match="the validation split of 0 tokens; give more text, or"):
        ready(files=str(tmp_path / "a.txt"), seq_len=1)
