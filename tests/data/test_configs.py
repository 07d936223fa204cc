"""The committed data and tokeniser configs, as a user reaches them from the command line."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from data.corpora import Hub, PySource, TextFiles
from data.recall import Recall
from data.tokenizers import BPETokenizer, ByteTokenizer, PretrainedTokenizer

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def from_command_line(*overrides):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = compose("train", overrides=list(overrides))
    return instantiate(
        cfg.data,
        tokenizer=instantiate(cfg.tokenizer),
        micro_batch_size=1,
        sequences_per_step=1,
        max_steps=1,
    )


@pytest.mark.parametrize(
    ("name", "corpus"),
    [("pysource", PySource), ("text_files", TextFiles), ("hub", Hub), ("recall", Recall)],
)
def test_each_corpus_is_made(name, corpus):
    assert type(from_command_line(f"data={name}").corpus) is corpus


@pytest.mark.parametrize(
    ("name", "tokenizer"),
    [("byte", ByteTokenizer), ("bpe", BPETokenizer), ("pretrained", PretrainedTokenizer)],
)
def test_each_tokeniser_is_made(name, tokenizer):
    assert type(from_command_line(f"tokenizer={name}").tokenizer) is tokenizer


def test_lengths_and_seeds_follow_the_root_keys():
    data = from_command_line("seq_len=77", "seed=5")
    assert (data.seq_len, data.seed) == (77, 5)


def test_files_and_vocabulary_are_one_override_each(letters, tmp_path):
    data = from_command_line(
        "data=text_files",
        f"data.files='{letters}/**/*.txt'",
        f"data.cache_dir={tmp_path}/cache",
        "tokenizer=bpe",
        "tokenizer.vocab_size=264",
        "seq_len=16",
    )
    data.prepare_data()
    data.setup("fit")
    assert data.vocab_size == 264


def test_files_may_be_a_list(letters, tmp_path):
    data = from_command_line(
        "data=text_files",
        f"data.files=[{letters}/00.txt,{letters}/01.txt]",
        f"data.cache_dir={tmp_path}/cache",
        "seq_len=16",
    )
    data.prepare_data()
    data.setup("fit")
    assert data.n_train_tokens + 101 == 2 * 101


def test_the_default_cache_is_ignored_by_git():
    data = from_command_line()
    relative = data.cache_dir.relative_to(CONFIGS.parent)
    assert f"{relative.parts[0]}/" in (CONFIGS.parent / ".gitignore").read_text().splitlines()


def test_every_key_has_a_comment():
    for file in [*CONFIGS.glob("data/*.yaml"), *CONFIGS.glob("tokenizer/*.yaml")]:
        for line in file.read_text().splitlines():
            key = line.split(":")[0].strip()
            told_above = key in ("defaults", "corpus", "_target_") or line[:1] in "#"
            assert told_above or ":" not in line or " # " in line, f"{file.name}: {line}"
