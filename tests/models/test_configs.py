import inspect
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

import training.cli  # noqa: F401 - registers the resolvers that the configs use
from flash_attention import Attention, SDPAttention
from models.gpt import GPT
from models.loss import ChunkedLoss, FullLoss
from models.optim import AdamWCosine

CONFIGS = Path(__file__).parents[2] / "configs"
ATTENTIONS = sorted(path.stem for path in (CONFIGS / "attention").glob("*.yaml"))
MODELS = sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))


def load(group, name, **root):
    """The choice ``name`` of ``group`` with the root keys that it interpolates."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return OmegaConf.merge(root, compose(f"{group}/{name}"))[group]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_config_has_each_argument_of_gpt(name):
    arguments = inspect.signature(GPT).parameters.keys() - {"attention"}
    assert load("model", name, seq_len=8).keys() - {"_target_"} == arguments


@pytest.mark.parametrize("name", ATTENTIONS)
def test_an_attention_config_has_each_argument_of_the_backend_of_its_name(name):
    config = load("attention", name, deterministic=False)
    backend = instantiate(config)
    assert isinstance(backend, Attention)
    assert backend.name == name
    own = vars(type(backend)).get("__init__", object.__init__)
    arguments = inspect.signature(own).parameters.keys() - {"self", "args", "kwargs"}
    assert config.keys() - {"_target_"} == arguments


@pytest.mark.parametrize(
    ("name", "millions"),
    [("gpt2_small", 124), ("gpt2_medium", 355), ("gpt2_large", 774), ("gpt2_xl", 1558)],
)
def test_a_gpt2_config_with_learned_positions_has_gpt2s_size(name, millions):
    config = load("model", name, seq_len=1024)
    with torch.device("meta"):
        model = instantiate(config, vocab_size=50257, positions="learned", attention=SDPAttention())
    assert round(model.n_params() / 1e6) == millions


def test_the_tiny_model_runs_at_the_root_seq_len():
    model = instantiate(load("model", "tiny", seq_len=24), vocab_size=256, attention=SDPAttention())
    assert model.seq_len == 24
    assert model.n_params() < 1e6
    assert model(torch.zeros(1, 24, dtype=torch.long)).shape == (1, 24, 256)


@pytest.mark.parametrize(("name", "loss"), [("full", FullLoss), ("chunked", ChunkedLoss)])
def test_a_loss_config_has_each_argument_of_its_class(name, loss):
    config = load("loss", name)
    assert config.keys() - {"_target_"} == inspect.signature(loss).parameters.keys()
    assert type(instantiate(config)) is loss


def test_the_optimizer_config_has_each_argument_and_follows_max_steps_and_width():
    config = load("optim", "adamw", max_steps=77, model={"width": 800})
    assert config.keys() - {"_target_"} == inspect.signature(AdamWCosine).parameters.keys()
    optim = instantiate(config)
    assert optim.max_steps == 77
    assert optim.lr == pytest.approx(5e-4)
    assert type(optim.betas) is tuple
    assert [type(beta) for beta in optim.betas] == [float, float]
