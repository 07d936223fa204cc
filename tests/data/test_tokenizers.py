import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from data.errors import DataError
from data.tokenizers import BPETokenizer, ByteTokenizer, PretrainedTokenizer

TEXTS = ["def f(x):\n    return x\n" * 20, "naïve café, 東京 🙂\n" * 20]
# Unicode that UTF-8 can hold: no lone surrogates.
unicode_text = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer = BPETokenizer(280)
    tokenizer.fit(iter(TEXTS), folder)
    tokenizer.folder = folder
    return tokenizer


def test_byte_tokens_are_the_utf8_bytes():
    [ids] = ByteTokenizer().encode(["é\n"])
    assert ids.tolist() == [0xC3, 0xA9, 0x0A]


@given(unicode_text)
def test_bytes_come_back_as_the_text_and_never_hold_the_end_of_text(text):
    tokenizer = ByteTokenizer()
    [ids] = tokenizer.encode([text])
    assert tokenizer.decode(ids) == text
    assert tokenizer.eot not in ids.tolist()
    assert tokenizer.eot < tokenizer.vocab_size == 256


def test_byte_decode_takes_any_number_a_model_may_sample():
    assert ByteTokenizer().decode([104, 255, 0xC3, 105, 300]) == "h�i"


@given(unicode_text)
def test_bpe_comes_back_as_the_text(bpe, text):
    [ids] = bpe.encode([text])
    assert bpe.decode(ids) == text
    assert all(i < bpe.vocab_size for i in ids)


def test_bpe_has_the_vocabulary_asked_for_and_merges(bpe):
    assert bpe.vocab_size == 280
    [ids] = bpe.encode([TEXTS[0]])
    assert len(ids) < len(TEXTS[0]) * 0.6


def test_bpe_of_a_small_corpus_says_how_few_tokens_it_has(tmp_path):
    tokenizer = BPETokenizer(5000)
    tokenizer.fit(["abab"], tmp_path)
    assert 257 <= tokenizer.vocab_size < 270


def test_bpe_loads_as_it_was_trained(bpe):
    again = BPETokenizer(280)
    again.load(bpe.folder)
    assert (again.vocab_size, again.eot) == (bpe.vocab_size, bpe.eot)
    assert [a.tolist() for a in again.encode(TEXTS)] == [a.tolist() for a in bpe.encode(TEXTS)]


def test_text_that_spells_the_end_of_text_is_ordinary_text(bpe):
    [ids] = bpe.encode(["a<|endoftext|>b"])
    assert bpe.eot not in ids.tolist()
    assert bpe.decode(ids) == "a<|endoftext|>b"


def test_decode_leaves_out_the_end_of_text(bpe):
    [a], [b] = bpe.encode(["a", "b"])
    assert bpe.decode(np.array([a, bpe.eot, b])) == "ab"


@pytest.mark.parametrize("size", [256, 0, "many", None])
def test_bpe_refuses_a_size_that_cannot_hold_the_bytes(size):
    with pytest.raises(DataError, match=r"tokenizer\.vocab_size=.*at least 257"):
        BPETokenizer(size).fingerprint()


def test_fingerprints_differ_by_setting(bpe):
    path = str(bpe.folder / "tokenizer.json")
    made = [
        ByteTokenizer(),
        BPETokenizer(280),
        BPETokenizer(281),
        PretrainedTokenizer(path, "<|endoftext|>"),
        PretrainedTokenizer(path, "a"),
        PretrainedTokenizer("gpt2", "<|endoftext|>"),
    ]
    assert len({tokenizer.fingerprint() for tokenizer in made}) == len(made)


def test_pretrained_encodes_as_its_file_and_is_copied(bpe, tmp_path):
    pretrained = PretrainedTokenizer(str(bpe.folder / "tokenizer.json"), "<|endoftext|>")
    pretrained.fit([], tmp_path)
    assert pretrained.encode(TEXTS)[1].tolist() == bpe.encode(TEXTS)[1].tolist()
    assert (pretrained.vocab_size, pretrained.eot) == (bpe.vocab_size, bpe.eot)
    assert (tmp_path / "tokenizer.json").is_file()


def test_pretrained_does_not_truncate_or_pad(bpe, tmp_path):
    library = tokenizers.Tokenizer.from_file(str(bpe.folder / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=16)
    library.save(str(tmp_path / "short.json"))
    pretrained = PretrainedTokenizer(str(tmp_path / "short.json"), "<|endoftext|>")
    pretrained.fit([], tmp_path)
    for text in ("x", TEXTS[1]):
        [ids] = pretrained.encode([text])
        assert pretrained.eot not in ids  # what the padding would be
        assert pretrained.decode(ids) == text


def test_pretrained_fingerprint_notices_a_changed_file(bpe, tmp_path):
    file = tmp_path / "t.json"
    file.write_bytes((bpe.folder / "tokenizer.json").read_bytes())
    before = PretrainedTokenizer(str(file), "x").fingerprint()
    file.write_text(file.read_text() + " ")
    assert PretrainedTokenizer(str(file), "x").fingerprint() != before


def test_a_missing_end_of_text_token_lists_the_special_tokens(bpe, tmp_path):
    pretrained = PretrainedTokenizer(str(bpe.folder / "tokenizer.json"), "</s>")
    with pytest.raises(DataError, match=r"tokenizer\.eot_token='</s>'.*<\|endoftext\|>"):
        pretrained.fit([], tmp_path)


def test_a_file_that_is_no_tokeniser_is_named(tmp_path):
    (tmp_path / "t.json").write_text("[]")
    with pytest.raises(DataError, match=r"tokenizer\.name='.*t\.json' is neither"):
        PretrainedTokenizer(str(tmp_path / "t.json"), "x").fit([], tmp_path)


def test_pretrained_without_a_name_says_so():
    with pytest.raises(DataError, match=r"tokenizer\.name is not set"):
        PretrainedTokenizer(None, "x").fingerprint()
