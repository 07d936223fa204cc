import contextlib
import multiprocessing
import os
import signal
import time

import pytest

from data.cache import build_once, fingerprint
from data.errors import DataError


@pytest.fixture
def no_permission():
    """A context in which this process may not enter the folder, even where root runs the tests."""

    @contextlib.contextmanager
    def enter(folder):
        folder.mkdir(exist_ok=True)
        folder.chmod(0)
        was = os.geteuid()
        if was == 0:
            os.seteuid(65534)  # nobody
        try:
            yield
        finally:
            os.seteuid(was)
            folder.chmod(0o700)

    return enter


def write(text):
    return lambda folder: (folder / "file").write_text(text)


def test_fingerprint_is_the_same_in_every_process():
    assert fingerprint(a=1, b=["x", None]) == fingerprint(b=["x", None], a=1) == "c495611a5cc91dbd"


def test_a_folder_is_built_once(tmp_path):
    build_once(tmp_path / "cache" / "key", write("first"))
    folder = build_once(tmp_path / "cache" / "key", lambda folder: pytest.fail("built again"))
    assert (folder / "file").read_text() == "first"


def test_a_failed_build_leaves_nothing(tmp_path):
    def fail(folder):
        (folder / "file").write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        build_once(tmp_path / "key", fail)
    assert os.listdir(tmp_path) == []


def test_a_killed_build_is_not_taken_for_whole(tmp_path):
    def die(folder):
        (folder / "file").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(
        target=build_once, args=(tmp_path / "key", die)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    folder = build_once(tmp_path / "key", write("whole"))
    assert (folder / "file").read_text() == "whole"


def test_the_leftovers_of_a_killed_build_are_removed_a_day_later(tmp_path):
    old, new = tmp_path / "tmp-key-old", tmp_path / "tmp-key-new"
    old.mkdir()
    new.mkdir()
    os.utime(old, (0, time.time() - 25 * 3600))
    build_once(tmp_path / "key", write("x"))
    assert sorted(os.listdir(tmp_path)) == ["key", "tmp-key-new"]


def test_the_first_of_two_builders_wins(tmp_path):
    def build_slowly(folder):
        build_once(tmp_path / "key", write("other"))  # another process, faster
        (folder / "file").write_text("mine")

    folder = build_once(tmp_path / "key", build_slowly)
    assert (folder / "file").read_text() == "other"
    assert os.listdir(tmp_path) == ["key"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"data\.cache_dir='.*file' cannot be written"):
        build_once(tmp_path / "file" / "key", write("x"))


def fill_the_disk(folder):
    (folder / "file").write_text("x")
    with open("/dev/full", "w") as file:
        file.write("x")


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path):
    says = rf"data\.cache_dir='{tmp_path}' cannot be written \(No space left on device\)"
    with pytest.raises(DataError, match=says):
        build_once(tmp_path / "key", fill_the_disk)
    assert os.listdir(tmp_path) == []


def test_a_file_in_the_cache_that_cannot_be_written_is_the_cache_s_fault(tmp_path):
    with pytest.raises(DataError, match=r"data\.cache_dir=.* cannot be written"):
        build_once(tmp_path / "key", lambda folder: (folder / "no" / "file").write_text("x"))


def test_a_file_elsewhere_that_cannot_be_read_is_not_the_cache_s_fault(tmp_path):
    with pytest.raises(FileNotFoundError):
        build_once(tmp_path / "cache" / "key", lambda _: (tmp_path / "corpus.txt").read_text())
    assert os.listdir(tmp_path / "cache") == []


def test_a_cache_below_a_folder_without_permission_is_named(tmp_path, no_permission):
    with no_permission(tmp_path / "locked"):
        says = r"data\.cache_dir='.*cache' cannot be written \(Permission denied\)"
        with pytest.raises(DataError, match=says):
            build_once(tmp_path / "locked" / "cache" / "key", write("x"))


def test_a_leftover_that_another_process_removes_first_is_no_fault(tmp_path):
    (tmp_path / "tmp-key-gone").symlink_to(tmp_path / "nothing")  # glob finds it, stat does not
    assert build_once(tmp_path / "key", write("x")).is_dir()
