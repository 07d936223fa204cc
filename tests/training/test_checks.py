import copy

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from training.checks import RULES, check_config
from training.cli import CONFIGS
from training.errors import ConfigError


@pytest.fixture(scope="module")
def defaults():
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return hydra.compose("train", ["run_dir=x"])


def changed(defaults, change: str):
    return OmegaConf.merge(defaults, OmegaConf.from_dotlist([change]))


def test_the_defaults_are_accepted(defaults):
    check_config(defaults)


def test_every_rule_is_about_a_key_that_exists(defaults):
    cfg = defaults
    for key in RULES:
        node = cfg
        for part in key.split("."):
            assert part in node, key
            node = node[part]


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
        ("model.positions=none", "model.positions=none is not accepted; give one of rotary, lea"),
        ("model.rope_base=nan", "model.rope_base=nan "),
        ("model.n_head=3", "model.n_head=3 does not divide model.width=128"),
        ("model.n_kv_head=3", "model.n_kv_head=3 does not divide model.n_head=4"),
        ("model.width=12", "makes heads of 3 channels; give an even number"),
        ("model.width=2048", "makes heads of 512 channels; give heads of at most 256"),
        ("optim.lr=0", "optim.lr=0 is not accepted; give a number greater than 0"),
        ("optim.lr=fast", "optim.lr=fast "),
        ("optim.lr=inf", "optim.lr=inf "),
        ("optim.betas=[0.9,1]", "optim.betas=[0.9, 1] "),
        ("optim.warmup_steps=-1", "optim.warmup_steps=-1 "),
        ("logger.wandb.mode=cloud", "logger.wandb.mode=cloud "),
        ("sample.temperature=-1", "sample.temperature=-1 "),
        ("trainer.val_every_n_steps=0", "trainer.val_every_n_steps=0 "),
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
        "model.dropout=0",
        "optim.grad_clip=null",
        "optim.grad_clip=0",
        "model.n_kv_head=2",
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
