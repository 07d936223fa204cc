import pickle

import numpy as np
import pytest
import torch

from data.packing import PackedSequences, WithTargets


@pytest.fixture
def packed(tmp_path):
    """Makes the sequences of a file that holds 0, 1, 2, ..., n - 1."""

    def make(n, seq_len, dtype="uint16"):
        np.arange(n).astype(dtype).tofile(tmp_path / "tokens.bin")
        return PackedSequences(tmp_path / "tokens.bin", dtype, seq_len)

    return make


def test_neighbours_share_one_token(packed):
    sequences = packed(9, 4)
    assert [sequences[i]["tokens"].tolist() for i in range(2)] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]


@pytest.mark.parametrize(("n", "expected"), [(4, 0), (5, 1), (8, 1), (9, 2)])
def test_there_are_as_many_sequences_as_fit(packed, n, expected):
    assert len(packed(n, 4)) == expected


def test_every_token_is_a_target_once(packed):
    sequences = packed(41, 8)
    targets = torch.cat([s["tokens"][1:] for s in (sequences[i] for i in range(len(sequences)))])
    assert targets.tolist() == list(range(1, 41))


def test_tokens_past_16_bits_keep_their_value(packed):
    tokens = packed(70001, 70000, "uint32")[0]["tokens"]
    assert tokens.dtype == torch.int64
    assert tokens[-1] == 70000


def test_past_the_end_is_an_index_error(packed):
    with pytest.raises(IndexError):
        packed(9, 4)[2]


def test_a_pickle_holds_no_tokens(packed):
    sequences = packed(50_000, 4)
    pickled = pickle.dumps(sequences)
    assert len(pickled) < 1000
    assert pickle.loads(pickled)[3]["tokens"].tolist() == sequences[3]["tokens"].tolist()


def test_targets_are_made_of_each_sequence_s_own_tokens(packed):
    sequences = WithTargets(packed(9, 4), lambda tokens: -tokens[:, 1:])
    assert len(sequences) == 2
    assert sequences[1]["tokens"].tolist() == [4, 5, 6, 7, 8]
    assert sequences[1]["targets"].tolist() == [-5, -6, -7, -8]
