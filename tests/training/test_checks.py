import copy
from functools import cache

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from training.checks import RULES, check_config
from training.cli import CONFIGS
from training.errors import ConfigError

GROUPS = ("attention", "data", "logger", "loss", "model", "optim", "tokenizer")
CHOICES = sorted(
    f"{group}={path.stem}"
    for group in GROUPS
    for path in (CONFIGS / group).glob("*.yaml")
    if path.stem != "base"
)


def compose(*overrides: str):
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return hydra.compose("train", ["run_dir=x", *overrides])


@pytest.fixture(scope="module")
def defaults():
    return compose()


@pytest.fixture(autouse=True)
def no_wandb_mode(monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)


def changed(defaults, change: str):
    return OmegaConf.merge(defaults, OmegaConf.from_dotlist([change]))


def test_the_defaults_are_accepted(defaults):
    check_config(defaults)


def keys(node, prefix=""):
    """Every dotted key of a config, those of parts and of leaves."""
    for key, value in node.items():
        yield f"{prefix}{key}", value
        if isinstance(value, dict):
            yield from keys(value, f"{prefix}{key}.")


@cache
def values_of(choice: str) -> dict:
    return OmegaConf.to_container(compose(choice), resolve=True)


def test_every_rule_is_about_a_key_that_exists():
    known = {key for choice in CHOICES for key, _ in keys(values_of(choice))}
    assert not set(RULES) - known


@pytest.mark.parametrize("choice", CHOICES)
def test_every_leaf_has_a_rule(choice):
    leaves = {key for key, value in keys(values_of(choice)) if not isinstance(value, dict)}
    targets = {key for key in leaves if key.endswith("_target_")}  # check_targets
    assert not leaves - targets - set(RULES)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("seq_len=0", "seq_len=0 is not accepted; give an integer of at least 1"),
        ("seq_len=-1", "seq_len=-1 "),
        ("seq_len=1.5", "seq_len=1.5 "),
        ("seq_len=true", "seq_len=true "),
        ("seq_len=abc", "seq_len=abc "),
        ("seq_len=null", "seq_len=null "),
        ("seq_len=[1,2]", "seq_len=[1, 2] "),
        ("global_batch_tokens=much", "give an integer of at least 1, or auto"),
        ("micro_batch_tokens=0", "micro_batch_tokens=0 "),
        ("max_steps=-1", "max_steps=-1 "),
        ("seed=-1", "seed=-1 is not accepted; give an integer from 0 to 4294967295"),
        ("compile=1", "compile=1 is not accepted; give true or false"),
        ("model.dropout=1", "model.dropout=1 is not accepted; give a number of at least 0 and"),
        ("model.dropout=-0.1", "model.dropout=-0.1 "),
        ("model.n_layer=0", "model.n_layer=0 "),
        ("model.activation_checkpointing=all", "=all is not accepted; give one of none, block"),
        ("model.activation_checkpointing=null", "model.activation_checkpointing=null "),
        (
            "model.offload_checkpoints=1",
            "model.offload_checkpoints=1 is not accepted; give true or",
        ),
        ("model.offload_checkpoints=true", "give model.activation_checkpointing=block, or model."),
        ("model.positions=none", "model.positions=none is not accepted; give one of rotary, lea"),
        ("model.rope_base=nan", "model.rope_base=nan "),
        ("model.n_head=3", "model.n_head=3 does not divide model.width=128"),
        ("model.n_kv_head=3", "model.n_kv_head=3 does not divide model.n_head=4"),
        ("model.width=12", "makes heads of 3 channels; give an even number"),
        ("model.width=2048", "makes heads of 512 channels; give heads of at most 256"),
        ("optim.lr=0", "optim.lr=0 is not accepted; give a number greater than 0"),
        ("optim.lr=fast", "optim.lr=fast "),
        ("optim.lr=inf", "optim.lr=inf "),
        ("optim.lr=1" + "0" * 400, "optim.lr=1"),
        ("optim.betas=[0.9,1]", "optim.betas=[0.9, 1] "),
        ("optim.warmup_steps=-1", "optim.warmup_steps=-1 "),
        ("logger.wandb.mode=cloud", "logger.wandb.mode=cloud "),
        ("sample.temperature=-1", "sample.temperature=-1 "),
        ("trainer.val_every_n_steps=0", "trainer.val_every_n_steps=0 "),
        ("device=gpu", "device=gpu is not accepted; give one of auto, cpu, cuda"),
        ("precision=null", "precision=null is not accepted; give one of auto, 32-true, bf16"),
        ("max_steps=10000000000000000000", "give an integer from 1 to 1000000000000"),
        ("attention.deterministic=1", "attention.deterministic=1 is not accepted; give true or"),
        ("attention.q_splits=true", "attention.q_splits=true is not accepted; give an integer of"),
        ("attention.q_splits=0", "attention.q_splits=0 "),
        ("attention.block_q=100", "give one of 16, 32, 64, 128, 256, or null"),
        ("attention.block_kv=64.0", "attention.block_kv=64.0 "),
        ("attention._target_=null", "attention._target_=null is not accepted; give the dotted"),
        ("data.corpus._target_=5", "data.corpus._target_=5 is not accepted; give the dotted"),
        (
            "data.corpus=null",
            "data.corpus=null is not accepted; give data=pysource, text_files",
        ),
        ("data.corpus._partial_=false", "data.corpus._partial_=false "),
        ("data.cache_dir=5", "data.cache_dir=5 is not accepted; give a text that is not empty, or"),
        ("data.val_fraction=1", "give a number between 0 and 1"),
        ("data.val_fraction=true", "data.val_fraction=true "),
        ("data.val_tokens=true", "data.val_tokens=true "),
        ("data.num_workers=false", "data.num_workers=false "),
        ("sample=null", "sample=null is not accepted; give sample.max_new_tokens=0 for none"),
        ("sample.temperature=1e-4", "give a number of at least 0.001, or 0"),
        ("logger.wandb=5", "logger.wandb=5 is not accepted; give its keys one by one, or null"),
        ("callbacks.metrics=5", "callbacks.metrics=5 is not accepted; give its keys"),
        ("optim.max_steps=0", "optim.max_steps=0 "),
        ("model.seq_len=8", "model.seq_len=8 differs from seq_len=256; set seq_len only"),
        ("data.seq_len=8", "data.seq_len=8 differs from seq_len=256; set seq_len only"),
        ("data.seed=1", "data.seed=1 differs from seed=0; set seed only"),
        ("optim.lr=${nope}", "optim.lr refers to ${nope}, which does not exist"),
    ],
)
def test_a_bad_value_is_named_with_what_is_accepted(defaults, change, sentence):
    with pytest.raises(ConfigError) as caught:
        check_config(changed(defaults, change))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        "seed=0",
        "seq_len=8",
        "seed=5",
        "max_steps=1000000000000",
        "optim.max_steps=7",
        "attention.q_splits=2",
        "attention.block_q=64",
        "data.val_tokens=null",
        "sample.temperature=0",
        "sample.temperature=1e-3",
        "callbacks.progress=null",
        "model.dropout=0",
        "optim.grad_clip=null",
        "optim.grad_clip=0",
        "model.n_kv_head=2",
        "model.activation_checkpointing=block",
        "logger.wandb=null",
        "global_batch_tokens=auto",
        "sample.max_new_tokens=0",
        "sample.prompt=''",
        "model.positions=learned",
        "resume=last",
    ],
)
def test_a_good_value_at_the_edge_is_accepted(defaults, change):
    check_config(changed(defaults, change))


def test_a_value_that_must_be_given_is_named(defaults):
    cfg = copy.deepcopy(defaults)
    cfg.optim.lr = "???"
    with pytest.raises(ConfigError, match=r"optim\.lr is not set; give optim\.lr=\.\.\."):
        check_config(cfg)


@pytest.mark.parametrize(
    ("choice", "change", "sentence"),
    [
        ("loss=chunked", "loss.chunk_tokens=0", "give an integer of at least 1, or auto"),
        ("loss=chunked", "loss.chunk_tokens=few", "loss.chunk_tokens=few is not accepted"),
        ("data=text_files", "data.files=5", "data.files=5 is not accepted; give a text or a list"),
        ("data=text_files", "data.files=[a,1]", "data.files=['a', 1] "),
        ("data=hub", "data.path=5", "data.path=5 is not accepted; give a text that is not empty"),
        ("data=hub", "data.split=null", "data.split=null "),
        ("data=hub", "data.streaming=yes please", "data.streaming=yes please "),
        ("data=hub", "data.max_documents=true", "data.max_documents=true "),
        ("tokenizer=bpe", "tokenizer.vocab_size=256", "give an integer of at least 257"),
        ("tokenizer=pretrained", "tokenizer.name=5", "tokenizer.name=5 "),
        ("tokenizer=pretrained", "tokenizer.eot_token=null", "tokenizer.eot_token=null "),
    ],
)
def test_a_bad_value_of_another_choice_is_named(choice, change, sentence):
    with pytest.raises(ConfigError) as caught:
        check_config(changed(compose(choice), change))
    assert sentence in str(caught.value)


@pytest.mark.parametrize("change", ["data.files=a/*.txt", "data.files=[a,b]", "data.files=null"])
def test_files_are_one_glob_or_several_or_left_to_the_corpus(change):
    check_config(changed(compose("data=text_files"), change))


def test_an_unknown_wandb_mode_of_the_environment_is_named(defaults, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "cloud")
    with pytest.raises(ConfigError) as caught:
        check_config(defaults)
    sentence = "WANDB_MODE=cloud is not accepted; give one of online, offline, disabled"
    assert str(caught.value) == sentence


@pytest.mark.parametrize("mode", ["", "online", "offline", "disabled"])
def test_a_wandb_mode_of_the_environment_is_accepted(defaults, monkeypatch, mode):
    monkeypatch.setenv("WANDB_MODE", mode)
    check_config(defaults)


def test_the_wandb_mode_does_not_matter_without_wandb(defaults, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "cloud")
    check_config(changed(defaults, "logger.wandb=null"))
