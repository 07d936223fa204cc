import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf

from training import cli


def error_of(*overrides: str) -> Exception:
    GlobalHydra.instance().clear()
    with (
        hydra.initialize_config_dir(str(cli.CONFIGS), version_base="1.3"),
        pytest.raises(HydraException) as caught,
    ):
        hydra.compose("train", list(overrides))
    return caught.value


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("seqlen=1", "there is no key seqlen; did you mean seq_len?"),
        ("optim.lrr=1", "there is no key optim.lrr; did you mean optim.lr?"),
        ("n_head=1", "there is no key n_head; did you mean model.n_head?"),
        ("model.layers=2", "there is no key model.layers; did you mean model.n_layer?"),
        ("attentoin=naive", "there is no key attentoin; did you mean attention?"),
        ("qqqq=1", "there is no key qqqq; `python train.py --help` lists the keys"),
        ("attention=nope", "attention=nope is no choice; give one of flash_v1, naive, sdpa"),
        ("data=nope", "data=nope is no choice; give one of hub, pysource, text_files"),
    ],
)
def test_a_wrong_command_line_is_explained(override, sentence, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", override])
    assert cli.explain(error_of(override)) == sentence


def test_an_unreadable_override_is_one_line():
    assert cli.explain(error_of("max_steps=[1")).startswith("max_steps=[1 is not key=value")


def test_suggestions_know_the_choices_made(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "data=hub", "data.pth=x"])
    error = error_of("data=hub", "data.pth=x")
    assert cli.explain(error) == "there is no key data.pth; did you mean data.path?"


def test_launch_prints_one_line_and_exits_with_2(monkeypatch, capsys):
    monkeypatch.delenv(cli.TRACEBACK, raising=False)
    monkeypatch.setenv(cli.OURS, "1")
    with pytest.raises(SystemExit) as caught:
        cli.launch(lambda: (_ for _ in ()).throw(error_of("seqlen=1")))
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_launch_shows_all_when_the_user_asks_for_it(monkeypatch):
    monkeypatch.setenv(cli.TRACEBACK, "1")
    monkeypatch.delenv(cli.OURS, raising=False)
    with pytest.raises(HydraException):
        cli.launch(lambda: (_ for _ in ()).throw(error_of("seqlen=1")))


def test_what_launch_sets_is_not_taken_for_the_user_by_a_child(monkeypatch):
    monkeypatch.delenv(cli.TRACEBACK, raising=False)
    monkeypatch.setenv(cli.OURS, "1")  # registered, so that it is taken back after the test
    monkeypatch.delenv(cli.OURS)
    monkeypatch.setattr(cli.os, "environ", dict(cli.os.environ))
    cli.launch(lambda: None)
    assert cli.os.environ[cli.TRACEBACK] == "1"
    assert not cli.full_traceback_wanted()


def test_a_missing_value_is_named():
    cfg = OmegaConf.create({"data": {"files": "???"}})
    with pytest.raises(Exception, match="Missing mandatory") as caught:
        OmegaConf.to_container(cfg, throw_on_missing=True)
    assert cli.explain_value(caught.value) == "data.files is not set; give data.files=..."


def test_folder_names_have_no_separators_and_an_end():
    assert cli.folder_name("attention=naive,seq_len=1024") == "attention=naive,seq_len=1024"
    assert cli.folder_name("data.files='/a/b c/*.txt'") == "data.files=-a-b-c-.txt-"
    assert len(cli.folder_name("x" * 1000)) == 100
