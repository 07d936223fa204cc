import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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


def test_a_tokeniser_file_without_permission_is_named(bpe, tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir()
    (folder / "t.json").write_bytes((bpe.folder / "tokenizer.json").read_bytes())
    folder.chmod(0)
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)  # nobody: root may read everything
    says = r"tokenizer\.name='.*t\.json' cannot be read \(Permission denied\)"
    try:
        with pytest.raises(DataError, match=says):
            PretrainedTokenizer(str(folder / "t.json"), "<|endoftext|>").fingerprint()
    finally:
        os.seteuid(was)
        folder.chmod(0o700)


def test_a_full_disk_is_an_os_error_that_the_cache_can_name(bpe, tmp_path):
    (tmp_path / "tokenizer.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        PretrainedTokenizer(str(bpe.folder / "tokenizer.json"), "<|endoftext|>").fit([], tmp_path)


@pytest.mark.parametrize("content", [None, "", "{}"])
def test_a_damaged_tokeniser_in_the_cache_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=rf"the token cache '{tmp_path}' is damaged; delete that"):
        BPETokenizer(280).load(tmp_path)


def test_an_error_while_the_texts_are_read_comes_through(tmp_path):
    def texts():
        yield TEXTS[0]
        raise DataError("data.files: one of them is not UTF-8")

    with pytest.raises(DataError, match="one of them is not UTF-8"):
        BPETokenizer(280).fit(texts(), tmp_path)


# Prints "ready" when the reading has begun or ended, and would then take a minute.
INTERRUPTED = """
import random, signal, sys, time
from data.tokenizers import BPETokenizer

signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it

def texts(phase):
    letters = random.Random(0)
    for i in range(400 if phase == "merging" else 10**6):
        yield " ".join("".join(letters.choices("abcdefgh", k=20)) for _ in range(400))
        if phase == "reading":
            time.sleep(0.001)
            if i == 20:
                print("ready", flush=True)
    print("ready", flush=True)

BPETokenizer(200_000).fit(texts(sys.argv[1]), sys.argv[2])
print("trained")
"""


@pytest.mark.parametrize("phase", ["reading", "merging"])
def test_an_interrupt_ends_the_training_within_two_seconds(tmp_path, phase):
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, phase, str(tmp_path)],
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)  # into the merging
        process.send_signal(signal.SIGINT)
        start = time.monotonic()
        out, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert time.monotonic() - start < 3  # two, and some for a busy machine
    assert "trained" not in out
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert process.returncode == -signal.SIGINT
