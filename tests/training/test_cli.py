import shlex

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf

from training import cli
from training.errors import ConfigError


def composed(*overrides: str):
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(cli.CONFIGS), version_base="1.3"):
        return hydra.compose("train", list(overrides))


def error_of(*overrides: str) -> Exception:
    with pytest.raises(HydraException) as caught:
        composed(*overrides)
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
        (
            "attention=nope",
            "attention=nope is no choice; give one of flash_v1, flash_v2, naive, sdpa",
        ),
        ("data=nope", "data=nope is no choice; give one of hub, pysource, recall, text_files"),
        (
            "optim.betas=0.9,0.95",
            "optim.betas=0.9,0.95 gives several values; add -m for a run of each, write "
            "optim.betas=[0.9,0.95] for a list, or quote a text: \"optim.betas='0.9,0.95'\"",
        ),
    ],
)
def test_a_wrong_command_line_is_explained(override, sentence, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", override])
    assert cli.explain(error_of(override)) == sentence


def test_ctrl_c_before_a_run_has_begun_ends_in_a_sentence(monkeypatch, capsys):
    def main():
        raise KeyboardInterrupt  # while PyTorch is being imported, say

    monkeypatch.setattr("sys.argv", ["train.py"])
    with pytest.raises(SystemExit) as exit:
        cli.launch(main)
    assert exit.value.code == 130
    assert capsys.readouterr().err == "interrupted before the run began\n"


@pytest.mark.parametrize(
    ("override", "argument"),
    [
        ("resume=/tmp/a=b", "\"resume='/tmp/a=b'\""),
        ("sample.prompt=a=b", "\"sample.prompt='a=b'\""),
        ("sample.prompt=a[b", "\"sample.prompt='a[b'\""),
        ("sample.prompt=it's", "\"sample.prompt='it\\'s'\""),
        ('sample.prompt="$', "'sample.prompt='\"'\"'\"$'\"'\"''"),
    ],
)
def test_an_unreadable_override_is_shown_in_quotes(override, argument):
    told = cli.explain(error_of(override))
    if '"$' not in override:
        hint = f"quote the value: {argument}"
        assert told == f"{override} is not key=value as Hydra reads it; {hint}"
    typed = shlex.split(told.split("quote the value: ")[1])  # as a shell hands it on
    assert len(typed) == 1
    key, value = override.split("=", 1)
    assert OmegaConf.select(composed(*typed), key) == value


def test_an_override_without_a_value_is_explained():
    told = cli.explain(error_of("max_steps"))
    assert told == "max_steps is not key=value as Hydra reads it; give key=value"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["attention=null"],
            "attention=null is no choice; give one of flash_v1, flash_v2, naive, sdpa",
        ),
        (["data=5"], "data=5 is no choice; give one of hub, pysource, recall, text_files"),
        (["tokenizer=true"], "tokenizer=true is no choice; give one of bpe, byte, pretrained"),
        (["attention="], "attention= is no choice; give one of flash_v1, flash_v2, naive, sdpa"),
        (["attention=[naive,sdpa]"], "attention=[naive,sdpa] is no choice; give one of flash_v1"),
        (["attention={a: 1}"], "attention={a: 1} is no choice; give one of flash_v1"),
        (["-m", "attention=naive,null"], "attention=null is no choice; give one of flash_v1"),
        (["hydra/launcher=5"], "hydra/launcher=5 is no choice; give a name"),
        (["=5"], "=5 names no key; give key=value"),
        (["~model"], "~model takes away what a run needs"),
        (["~sample.prompt"], "~sample.prompt takes away what a run needs"),
        (["+seqlen=5"], "there is no key seqlen; did you mean seq_len?"),
        (["-m", "+seqlen=5,6"], "there is no key seqlen; did you mean seq_len?"),
        (["++nope.x=1"], "there is no key nope.x; `python train.py --help` lists the keys"),
        (["++optim.lrr=1"], "there is no key optim.lrr; did you mean optim.lr?"),
        (["++sample={temprature: 1}"], "there is no key sample.temprature; did you mean sample.te"),
        (["seq_len={b: 1}"], "there is no key seq_len.b; did you mean seq_len?"),
        (["+model@extra=tiny"], "there is no key extra"),
        (["++data.path=x"], "there is no key data.path"),
    ],
)
def test_what_hydra_would_take_is_refused(arguments, sentence, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", *arguments])
    with pytest.raises(ConfigError) as caught:
        cli.check_overrides(arguments)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "attention=naive,'sdpa'", "model=glob(gpt2*)", "--cfg", "job"],
        ["++seq_len=5"],
        ["++sample={temperature: 1}"],
        ["data=hub", "++data.path=x"],
        ["attention._target_=my.Attention", "+attention.window=64"],
        ["+callbacks.mine={_target_: my.Callback, n: 1}"],
        ["~callbacks.progress"],
        ["--config-dir=mine", "+mine=x"],
        ["+hydra.job.env_set.A=1", "hydra/launcher=basic", "hydra.run.dir='a=b'"],
    ],
)
def test_what_a_run_can_use_is_not_refused(arguments, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", *arguments])
    cli.check_overrides(arguments)


DEFAULTS = [
    f"{group}={'null' if choice is None else choice}"
    for default in OmegaConf.load(cli.CONFIGS / "train.yaml").defaults
    if default != "_self_"
    for group, choice in default.items()
]


@pytest.mark.parametrize("default", DEFAULTS)
def test_every_default_choice_can_be_typed_and_changes_nothing(default, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", default])
    cli.check_overrides([default])
    assert composed(default) == composed()


def test_launch_refuses_such_an_override_before_hydra_sees_it(monkeypatch, capsys):
    monkeypatch.setenv(cli.OURS, "1")
    monkeypatch.setenv(cli.TRACEBACK, "1")
    monkeypatch.setattr("sys.argv", ["train.py", "model=null"])
    with pytest.raises(SystemExit) as caught:
        cli.launch(lambda: pytest.fail("called"))
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("error: model=null is no choice; give one of gpt2")


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


def test_a_folder_name_holds_no_part_of_a_value():
    changes = [f"trainer.val_every_n_steps={n}000" for n in range(1, 9)]
    assert cli.folder_name(",".join(changes)) == f"{','.join(changes[:3])},more"
    assert cli.folder_name(",".join(changes[:3])) == ",".join(changes[:3])
    long_list = f"data.files={','.join(['some.txt'] * 20)}"
    assert cli.folder_name(f"seed=1,{long_list}") == "seed=1,more"
