import hashlib

import numpy as np
import pytest
from datasets import Dataset

from data.corpora import TextFiles
from data.errors import DataError
from data.prepare import open_split, prepare, split_documents, write_tokens
from data.tokenizers import BPETokenizer, ByteTokenizer


class Wide(ByteTokenizer):
    """Bytes in a vocabulary of a chosen size, the end of text last."""

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size
        self.eot = vocab_size - 1


def documents(n):
    return Dataset.from_dict({"text": [f"document {i}" for i in range(n)]})


def read(split):
    return np.fromfile(split.path, dtype=split.dtype).tolist()


def test_every_document_is_in_one_split():
    train, val = split_documents(documents(50), 0.1)
    assert sorted(train["text"][:] + val["text"][:]) == sorted(documents(50)["text"][:])
    assert len(val) == 5


def test_training_documents_keep_their_order_and_validation_is_spread():
    train, val = split_documents(documents(100), 0.1)
    numbers = [int(text.split()[1]) for text in train["text"][:]]
    assert numbers == sorted(numbers)
    chosen = [int(text.split()[1]) for text in val["text"][:]]
    assert max(chosen) - min(chosen) > 50


def test_the_split_is_the_same_every_time():
    assert (
        split_documents(documents(50), 0.1)[1]["text"][:]
        == (split_documents(documents(50), 0.1)[1]["text"][:])
    )


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_each_split_gets_a_document(fraction):
    train, val = split_documents(documents(2), fraction)
    assert (len(train), len(val)) == (1, 1)


def test_a_single_document_is_cut_near_its_end():
    train, val = split_documents(Dataset.from_dict({"text": ["0123456789"]}), 0.2)
    assert (train["text"][:], val["text"][:]) == (["01234567"], ["89"])


def test_an_end_of_text_follows_each_document(tmp_path):
    made = write_tokens(tmp_path / "x.bin", "uint16", ["ab", "c"], ByteTokenizer())
    assert np.fromfile(tmp_path / "x.bin", "uint16").tolist() == [97, 98, 255, 99, 255]
    digest = hashlib.sha256((tmp_path / "x.bin").read_bytes()).hexdigest()
    assert made == {"n_tokens": 5, "n_documents": 2, "sha256": digest}


def test_more_documents_than_a_batch_are_written_in_order(tmp_path):
    texts = [chr(97 + i % 26) for i in range(200)]
    write_tokens(tmp_path / "x.bin", "uint16", texts, ByteTokenizer())
    tokens = np.fromfile(tmp_path / "x.bin", "uint16")
    assert bytes(tokens[::2].tolist()).decode() == "".join(texts)


@pytest.mark.parametrize(("size", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_tokens_are_stored_as_small_as_the_vocabulary_allows(tmp_path, letters, size, dtype):
    folder = prepare(TextFiles(str(letters / "*.txt")), Wide(size), 0.1, tmp_path / "cache")
    split = open_split(folder, "val")
    assert split.dtype == dtype
    assert read(split)[100] == size - 1


def test_prepared_files_hold_the_corpus(tmp_path, letters):
    folder = prepare(TextFiles(str(letters / "*.txt")), ByteTokenizer(), 0.1, tmp_path / "cache")
    train, val = open_split(folder, "train"), open_split(folder, "val")
    assert (train.n_documents, val.n_documents) == (18, 2)
    assert (train.n_tokens, val.n_tokens) == (18 * 101, 2 * 101)
    assert sorted(read(train) + read(val)) == sorted([97 + i for i in range(20)] * 100 + [255] * 20)


def test_empty_documents_leave_no_trace(tmp_path):
    class Corpus:
        name = "mine"

        def fingerprint(self):
            return "x"

        def load(self):
            return Dataset.from_dict({"text": ["a", "", None, "b"] * 10})

    folder = prepare(Corpus(), ByteTokenizer(), 0.5, tmp_path)
    tokens = read(open_split(folder, "train")) + read(open_split(folder, "val"))
    assert sorted(tokens) == [97] * 10 + [98] * 10 + [255] * 20


def test_tokenising_is_announced_once_on_stderr(tmp_path, letters, capsys):
    for _ in range(2):
        prepare(TextFiles(str(letters / "*.txt")), ByteTokenizer(), 0.1, tmp_path / "cache")
    shown = capsys.readouterr()
    assert shown.err == "Tokenising 20 documents of text_files (once) ...\n"
    assert shown.out == ""


def test_a_second_run_reads_no_document(tmp_path, letters, monkeypatch):
    corpus = TextFiles(str(letters / "*.txt"))
    first = prepare(corpus, ByteTokenizer(), 0.1, tmp_path / "cache")
    monkeypatch.setattr(corpus, "load", lambda: pytest.fail("read again"))
    assert prepare(corpus, ByteTokenizer(), 0.1, tmp_path / "cache") == first


def test_corpus_tokeniser_and_split_make_caches_of_their_own(tmp_path, letters):
    every, some = TextFiles(str(letters / "*.txt")), TextFiles(str(letters / "0*.txt"))
    folders = {
        prepare(every, ByteTokenizer(), 0.1, tmp_path / "cache"),
        prepare(some, ByteTokenizer(), 0.1, tmp_path / "cache"),
        prepare(every, BPETokenizer(260), 0.1, tmp_path / "cache"),
        prepare(every, ByteTokenizer(), 0.2, tmp_path / "cache"),
    }
    assert len(folders) == 4


def test_bpe_is_trained_on_the_training_split_alone(tmp_path, letters):
    tokenizer = BPETokenizer(2000)
    folder = prepare(TextFiles(str(letters / "*.txt")), tokenizer, 0.1, tmp_path / "cache")
    words = tokenizer.encode([chr(97 + i) * 100 for i in range(20)])
    unseen = {chr(97 + i) for i, ids in enumerate(words) if len(ids) == 100}
    val = open_split(folder, "val")
    assert unseen == set(tokenizer.decode(read(val)))
    assert len(unseen) == 2


def test_a_corpus_without_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="data=text_files has no text"):
        prepare(TextFiles(str(tmp_path / "a.txt")), ByteTokenizer(), 0.1, tmp_path / "cache")


def test_a_truncated_token_file_is_refused(tmp_path, letters):
    folder = prepare(TextFiles(str(letters / "*.txt")), ByteTokenizer(), 0.1, tmp_path / "cache")
    with open(folder / "train.bin", "r+b") as file:
        file.truncate(10)
    with pytest.raises(DataError, match="is damaged; delete that folder"):
        open_split(folder, "train")
