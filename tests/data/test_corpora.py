import json
import os
import platform
from functools import partial

import pytest
from rich.console import Console

from data import corpora
from data.corpora import Hub, PySource, TextFiles
from data.errors import DataError


def texts(corpus):
    return corpus.load()[:]["text"]


def hub(path, **changes):
    settings = {
        "config": None,
        "split": "train",
        "text_column": "text",
        "streaming": False,
        "max_documents": None,
    }
    return Hub(path=str(path), **(settings | changes))


@pytest.fixture
def local_hub(tmp_path, monkeypatch):
    """A folder that load_dataset reads as it does a Hub data set."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [{"text": f"document {i}", "title": f"title {i}", "number": i} for i in range(10)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_pysource_holds_a_module_of_the_standard_library():
    with open(json.__file__, encoding="utf-8") as file:
        assert file.read() in texts(PySource())


def test_pysource_leaves_out_tests_and_installed_packages():
    paths = PySource()._paths()
    assert not [p for p in paths if "/test/" in p or "-packages/" in p]
    assert len(paths) > 300


def test_pysource_reads_a_file_in_the_encoding_it_declares(tmp_path, monkeypatch):
    (tmp_path / "latin.py").write_bytes("# coding: latin-1\nx = 'é'\n".encode("latin-1"))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert texts(PySource()) == ["# coding: latin-1\nx = 'é'\n"]


def test_pysource_skips_a_file_that_lies_about_its_encoding(tmp_path, monkeypatch):
    (tmp_path / "bad.py").write_bytes(b"# coding: utf-8\nx = '\xe9'\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert texts(PySource()) == [""]


def test_pysource_without_sources_points_to_text_files(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="data=text_files"):
        PySource().load()


def test_pysource_fingerprint_notices_another_python(monkeypatch):
    before = PySource().fingerprint()
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")
    assert PySource().fingerprint() != before


def test_text_files_are_sorted_documents(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    assert texts(TextFiles(str(tmp_path / "*.txt"))) == ["a", "b", "c"]


def test_two_stars_match_any_depth(tmp_path):
    (tmp_path / "one" / "two").mkdir(parents=True)
    (tmp_path / "top.txt").write_text("top")
    (tmp_path / "one" / "two" / "deep.txt").write_text("deep")
    assert sorted(texts(TextFiles(str(tmp_path / "**" / "*.txt")))) == ["deep", "top"]


def test_a_file_matched_by_two_globs_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    assert texts(TextFiles([str(tmp_path / "*.txt"), str(tmp_path / "a*")])) == ["a"]


def test_a_relative_glob_starts_in_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("here")
    monkeypatch.chdir(tmp_path)
    assert texts(TextFiles("*.txt")) == ["here"]


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("home")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert texts(TextFiles("~/a.txt")) == ["home"]


def test_a_name_with_brackets_is_found(tmp_path):
    (tmp_path / "notes[1].txt").write_text("brackets")
    assert texts(TextFiles(str(tmp_path / "notes[1].txt"))) == ["brackets"]


def test_line_ends_become_newlines_and_the_byte_order_mark_goes(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert texts(TextFiles(str(tmp_path / "a.txt"))) == ["one\ntwo\n"]


def test_empty_files_are_no_documents(tmp_path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text("b")
    assert texts(TextFiles(str(tmp_path / "*.txt"))) == ["b"]


def test_text_files_fingerprint_notices_a_changed_file(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("a")
    os.utime(file, ns=(0, 0))
    corpus = TextFiles(str(file))
    before = corpus.fingerprint()
    assert corpus.fingerprint() == before
    os.utime(file, ns=(0, 1))
    touched = corpus.fingerprint()
    file.write_text("ab")
    os.utime(file, ns=(0, 0))
    assert len({before, touched, corpus.fingerprint()}) == 3


def test_text_files_fingerprint_notices_a_new_file(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    corpus = TextFiles(str(tmp_path / "*.txt"))
    before = corpus.fingerprint()
    (tmp_path / "b.txt").write_text("b")
    assert corpus.fingerprint() != before


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (None, r"data\.files is not set"),
        ("nothing/*.txt", r"data\.files='nothing/\*\.txt' matches no file"),
        (".", r"data\.files='\.' is a folder.*'\./\*\*/\*\.txt'"),
    ],
)
def test_files_that_give_nothing_are_named(files, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=says):
        TextFiles(files).fingerprint()


def test_a_file_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"fine \xff")
    with pytest.raises(DataError, match=r"bad\.txt' is not UTF-8 \(byte 5\)"):
        texts(TextFiles(str(tmp_path / "*.txt")))


def test_hub_reads_the_text_column(local_hub):
    assert texts(hub(local_hub)) == [f"document {i}" for i in range(10)]


def test_hub_reads_a_column_of_another_name(local_hub):
    assert texts(hub(local_hub, text_column="title", max_documents=1)) == ["title 0"]


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_stops_after_max_documents(local_hub, streaming):
    corpus = hub(local_hub, streaming=streaming, max_documents=3)
    assert texts(corpus) == ["document 0", "document 1", "document 2"]


def test_a_streaming_download_shows_its_progress_on_a_terminal(local_hub, monkeypatch, capsys):
    terminal = partial(Console, force_terminal=True, width=80)
    monkeypatch.setattr(corpora, "Console", terminal)
    hub(local_hub, streaming=True, max_documents=3).load()
    shown = capsys.readouterr()
    assert "Downloading documents" in shown.err
    assert "100%" in shown.err
    assert shown.out == ""


def test_hub_takes_a_slice_of_a_split(local_hub):
    assert texts(hub(local_hub, split="train[:20%]")) == ["document 0", "document 1"]


@pytest.mark.parametrize("column", ["body", "number"])
def test_hub_names_the_columns_when_there_is_no_such_text(local_hub, column):
    with pytest.raises(DataError, match=rf"data\.text_column='{column}'.* text, title, number"):
        hub(local_hub, text_column=column).load()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"streaming": True}, r"give data\.max_documents a number"),
        ({"max_documents": 0}, r"data\.max_documents=0 is not accepted"),
        ({"max_documents": "ten"}, r"data\.max_documents='ten' is not accepted"),
        ({"split": None}, r"data\.split is not set"),
        ({"split": "nowhere"}, r"data\.split='nowhere'\) could not be loaded"),
    ],
)
def test_hub_settings_are_checked(local_hub, changes, says):
    with pytest.raises(DataError, match=says):
        hub(local_hub, **changes).load()


def test_hub_without_a_path_says_so():
    with pytest.raises(DataError, match=r"data\.path is not set"):
        hub("").fingerprint()


def test_hub_failure_is_one_sentence_with_the_name(monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'a/b' on the Hub\nsecond line")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(DataError, match=r"data\.path='a/b'.*Couldn't reach 'a/b' on the Hub$"):
        hub("a/b").load()


def test_hub_fingerprint_needs_no_network_and_notices_settings(monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: pytest.fail("network"))
    prints = {
        hub("a/b", **changes).fingerprint()
        for changes in ({}, {"config": "x"}, {"split": "test"}, {"max_documents": 3})
    }
    assert len(prints) == 4
    assert hub("a/b", max_documents=3, streaming=True).fingerprint() in prints
