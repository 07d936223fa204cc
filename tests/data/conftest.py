import pytest

from data.corpora import TextFiles
from data.module import TokenDataModule
from data.recall import Recall
from data.tokenizers import ByteTokenizer


@pytest.fixture
def letters(tmp_path):
    """20 files of 100 letters each: the file names' order is that of the letters."""
    folder = tmp_path / "letters"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i:02}.txt").write_text(chr(ord("a") + i) * 100)
    return folder


@pytest.fixture
def make_data(letters, tmp_path):
    """Makes a data module on the letters; it is not prepared yet."""

    def make(**changes):
        settings = dict(
            corpus=TextFiles,
            files=str(letters / "*.txt"),
            tokenizer=ByteTokenizer(),
            seq_len=16,
            val_fraction=0.1,
            val_tokens=None,
            cache_dir=tmp_path / "cache",
            num_workers=0,
            seed=0,
            micro_batch_size=2,
            sequences_per_step=4,
            max_steps=5,
        )
        return TokenDataModule(**(settings | changes))

    return make


@pytest.fixture
def ready(make_data):
    """Makes a prepared data module on the letters."""

    def make(**changes):
        data = make_data(**changes)
        data.prepare_data()
        data.setup("fit")
        return data

    return make


@pytest.fixture
def recall_data(tmp_path):
    """Makes a prepared data module on a recall stream of lag 24."""

    def make(**changes):
        settings = dict(
            corpus=Recall,
            lag=24,
            symbols=4,
            block=5,
            n_tokens=20_000,
            stream_seed=0,
            tokenizer=ByteTokenizer(),
            seq_len=48,
            val_fraction=0.1,
            val_tokens=None,
            cache_dir=tmp_path / "cache",
            num_workers=0,
            seed=0,
            micro_batch_size=2,
            sequences_per_step=4,
            max_steps=5,
        )
        data = TokenDataModule(**(settings | changes))
        data.prepare_data()
        data.setup("fit")
        return data

    return make
