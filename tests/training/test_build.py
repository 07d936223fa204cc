from omegaconf import OmegaConf

from training.build import build_callbacks
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
