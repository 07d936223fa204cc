import numpy as np
import pytest
import torch

from data.corpora import TextFiles
from data.errors import DataError
from data.tokenizers import BPETokenizer, ByteTokenizer


def test_sizes_of_the_splits(ready):
    data = ready()
    assert data.vocab_size == 256
    assert data.n_train_tokens == 18 * 101
    assert data.n_val_tokens == 201 // 16 * 16


def test_batches_are_int64_of_one_token_more_than_seq_len(ready):
    tokens = next(iter(ready().train_dataloader()))["tokens"]
    assert tokens.dtype == torch.int64
    assert tokens.shape == (2, 17)


def test_training_batches_come_from_the_training_split(ready):
    data = ready()
    train = np.fromfile(data._folder / "train.bin", "uint16")
    rows = {tuple(train[i * 16 : i * 16 + 17]) for i in range(len(train) // 16)}
    for batch, _ in zip(data.train_dataloader(), range(20), strict=False):
        assert {tuple(row) for row in batch["tokens"].tolist()} <= rows


def test_the_loader_is_as_long_as_the_run(ready):
    data = ready(micro_batch_size=2, sequences_per_step=6, max_steps=7)
    assert len(data.train_dataloader()) == 21


def test_validation_reads_the_split_from_its_start_in_order(ready):
    data = ready(val_tokens=100)
    assert data.n_val_tokens == 96
    tokens = torch.cat([batch["tokens"] for batch in data.val_dataloader()])
    val = np.fromfile(data._folder / "val.bin", "uint16").astype(np.int64)
    assert tokens[:, 1:].reshape(-1).tolist() == val[1:97].tolist()


def test_validation_keeps_a_smaller_last_batch(ready):
    data = ready(val_tokens=5 * 16, micro_batch_size=2)
    assert [len(batch["tokens"]) for batch in data.val_dataloader()] == [2, 2, 1]


def test_validation_takes_a_sequence_even_if_longer_than_val_tokens(ready):
    assert ready(val_tokens=1).n_val_tokens == 16


def test_seq_len_does_not_change_which_tokens_validate(ready):
    texts = set()
    for seq_len in (10, 20, 50):
        data = ready(seq_len=seq_len, val_tokens=100)
        rows = torch.cat([batch["tokens"] for batch in data.val_dataloader()])
        texts.add(tuple(rows[:, 1:].reshape(-1).tolist()))
    assert len(texts) == 1


def test_bytes_per_token_counts_the_bytes_of_the_validated_text(ready):
    data = ready(tokenizer=ByteTokenizer(), seq_len=101, val_tokens=None)
    # 101 targets: 99 letters, an end of text, a letter of the next document
    assert data.n_val_tokens == 101
    assert data.bytes_per_token == pytest.approx(100 / 101)


def test_bytes_per_token_of_bpe(ready, tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text("#" + "été " * 100, encoding="utf-8")
    data = ready(
        files=str(tmp_path / "*.txt"), tokenizer=BPETokenizer(270), val_tokens=None, seq_len=51
    )
    # One document: after "#", which is no target, "été", 99 times " été", " " and the end of text.
    assert data.n_val_tokens == 102
    assert data.bytes_per_token == pytest.approx(100 * 6 / 102)


def test_loader_processes_give_the_same_batches(ready):
    def first(data):
        return [
            b["tokens"].tolist() for b, _ in zip(data.train_dataloader(), range(6), strict=False)
        ]

    assert first(ready(num_workers=2)) == first(ready())


def test_loading_leaves_the_global_random_state_alone(ready):
    data = ready()
    before = torch.get_rng_state()
    next(iter(data.train_dataloader()))
    next(iter(data.val_dataloader()))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_seed_orders_training_and_not_the_split(ready):
    a, b = ready(seed=0), ready(seed=1)
    assert a._folder == b._folder
    first = [next(iter(data.train_dataloader()))["tokens"].tolist() for data in (a, b)]
    assert first[0] != first[1]


def test_the_cache_does_not_depend_on_seq_len(ready):
    assert ready(seq_len=8)._folder == ready(seq_len=16)._folder


def test_a_tilde_in_cache_dir_is_the_home_folder(ready, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ready(cache_dir="~/tokens")._folder.parent == tmp_path / "tokens"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"seq_len": 1818},
            r"seq_len=1818 is too long for the training split of 1818 tokens; "
            r"give seq_len=1817 or less.*data\.val_fraction",
        ),
        ({"seq_len": 202}, r"seq_len=202 is too long for the validation split of 202 tokens"),
        ({"val_fraction": 0}, r"data\.val_fraction=0 .* between 0 and 1"),
        ({"val_fraction": 1}, r"data\.val_fraction=1 "),
        ({"val_fraction": "half"}, r"data\.val_fraction='half' "),
        ({"val_tokens": 0}, r"data\.val_tokens=0 .*at least 1, or null"),
        ({"num_workers": -1}, r"data\.num_workers=-1 .*at least 0"),
        ({"files": None}, r"data\.files is not set"),
    ],
)
def test_bad_settings_are_named(ready, changes, says):
    with pytest.raises(DataError, match=says):
        ready(**changes)


def test_the_longest_seq_len_the_message_promises_works(ready):
    assert ready(seq_len=201).n_val_tokens == 201


def test_nothing_is_checked_before_it_is_prepared(make_data):
    make_data(files=None, val_fraction=7)  # Hydra would wrap an error of a constructor


def test_a_micro_batch_that_does_not_divide_the_step_is_refused(make_data):
    with pytest.raises(ValueError, match="not a multiple"):
        make_data(micro_batch_size=3, sequences_per_step=4)


def test_an_unknown_setting_of_the_corpus_is_refused(make_data):
    with pytest.raises(TypeError, match="colour"):
        make_data(corpus=TextFiles, colour="red")


@pytest.mark.parametrize(("n_tokens", "expected"), [(50, [51]), (100, [101]), (150, [101, 50])])
def test_documents_are_as_long_as_validation_reads_them(ready, n_tokens, expected):
    data = ready(seq_len=n_tokens, val_tokens=n_tokens)  # files of 100 letters and an end
    assert data.val_document_lengths().tolist() == expected
