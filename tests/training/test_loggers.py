from unittest.mock import Mock

import pytest
from lightning.pytorch.loggers import WandbLogger
from omegaconf import OmegaConf

from training import loggers
from training.loggers import CsvLogger, make_loggers, wandb_mode
from training.resume import Resumed


def read(folder) -> list[str]:
    return (folder / "metrics.csv").read_text().splitlines()


def test_a_row_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    logger = CsvLogger(tmp_path)
    logger.log_metrics({"train/loss": 0.1 + 0.2}, step=1)
    assert read(tmp_path) == ["step,train/loss", "1,0.30000000000000004"]


def test_a_new_column_keeps_the_rows_before(tmp_path):
    logger = CsvLogger(tmp_path)
    logger.log_metrics({"a": 1}, step=1)
    logger.log_metrics({"b": 2}, step=2)
    logger.log_metrics({"a": 3}, step=3)
    assert read(tmp_path) == ["step,a,b", "1,1.0,", "2,,2.0", "3,3.0,"]


@pytest.mark.parametrize("same_folder", [True, False])
def test_a_resumed_file_has_the_rows_up_to_the_checkpoint(tmp_path, same_folder):
    old = tmp_path / "old"
    logger = CsvLogger(old)
    for step in range(1, 13):
        logger.log_metrics({"a": step}, step=step)
    with open(old / "metrics.csv", "a") as file:
        file.write("1")  # the start of "13,13.0": killed while writing
    new = old if same_folder else tmp_path / "new"
    logger = CsvLogger(new, Resumed(old / "checkpoints" / "last.ckpt", 2, {}))
    logger.log_metrics({"a": 9}, step=3)
    assert read(new) == ["step,a", "1,1.0", "2,2.0", "3,9.0"]


def test_a_resumed_file_without_history_starts_empty(tmp_path):
    CsvLogger(tmp_path / "new", Resumed(tmp_path / "last.ckpt", 2, {}))
    assert read(tmp_path / "new") == ["step"]


def test_a_wandb_run_that_does_not_take_the_config_is_finished_as_failed(tmp_path, monkeypatch):
    class Broken(WandbLogger):
        experiment = Mock()

        def __init__(self): ...

        def log_hyperparams(self, params):
            raise OSError("no space left")

    monkeypatch.setattr(loggers, "make_wandb", lambda *args: Broken())
    cfg = OmegaConf.create({"run_dir": str(tmp_path), "logger": {"wandb": {"project": "x"}}})
    with pytest.raises(OSError, match="no space left"):
        make_loggers(cfg, None)
    Broken.experiment.finish.assert_called_once_with(exit_code=1)


@pytest.fixture
def no_key(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "netrc"


def test_wandb_is_offline_without_a_key(no_key):
    assert wandb_mode("auto") == "offline"


def test_wandb_is_online_with_a_key_in_the_environment(no_key, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert wandb_mode("auto") == "online"


def test_wandb_is_online_with_a_key_in_netrc(no_key):
    no_key.write_text("machine api.wandb.ai login user password secret\n")
    assert wandb_mode("auto") == "online"


def test_a_key_of_another_host_does_not_count(no_key):
    no_key.write_text("machine example.org login user password secret\n")
    assert wandb_mode("auto") == "offline"


def test_wandb_mode_of_the_environment_comes_before_a_key(no_key, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode("auto") == "disabled"


def test_a_mode_given_is_taken(no_key, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    assert wandb_mode("offline") == "offline"
