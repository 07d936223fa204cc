from omegaconf import OmegaConf

from flash_attention import SDPAttention
from models.loss import ChunkedLoss
from training.build import build_callbacks, build_model
from training.checkpoint import SaveCheckpoint


def test_a_callback_that_is_null_is_left_out():
    checkpoint = {
        "_target_": "training.checkpoint.SaveCheckpoint",
        "folder": "somewhere",
        "every_n_steps": 1,
    }
    cfg = OmegaConf.create({"callbacks": {"progress": None, "checkpoint": checkpoint}})
    (callback,) = build_callbacks(cfg, {"about": "it"})
    assert isinstance(callback, SaveCheckpoint)
    assert callback.about == {"about": "it"}


def test_the_model_is_trained_with_the_loss_that_is_chosen():
    model = {
        "_target_": "models.gpt.GPT",
        "vocab_size": 8,
        "seq_len": 4,
        "n_layer": 1,
        "n_head": 1,
        "width": 8,
    }
    cfg = OmegaConf.create(
        {
            "optim": {"_target_": "models.optim.AdamWCosine", "lr": 1.0, "max_steps": 1},
            "loss": {"_target_": "models.loss.ChunkedLoss", "chunk_tokens": 7},
            "compile": False,
        }
    )
    loss_fn = build_model(cfg, model, SDPAttention()).loss_fn
    assert isinstance(loss_fn, ChunkedLoss)
    assert loss_fn.chunk_tokens == 7
