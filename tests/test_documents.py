"""What the Markdown files name is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (".", "flash_attention", "results")
DOCUMENTS = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)[^)]*\)")
# In backticks or in a command: a file of these folders, not a pattern of some.
NAMED = re.compile(r"\b((?:scripts|tests|configs|results|training|models|data)/[\w/.-]+\.\w+)")

TEST = re.compile(r"`(test_\w+\.py)`")


def missing(document: Path) -> list[str]:
    text = document.read_text(encoding="utf-8")
    links = [name for name in LINK.findall(text) if not (document.parent / name).exists()]
    tests = [name for name in TEST.findall(text) if not any((ROOT / "tests").rglob(name))]
    return links + [name for name in NAMED.findall(text) if not (ROOT / name).exists()] + tests


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_a_document_names_is_there(document):
    assert missing(document) == []


def test_a_file_that_is_not_there_is_found_out(tmp_path):
    document = tmp_path / "README.md"
    document.write_text(
        "[a](gone.md) [b](./README.md) [c](https://x.org/y) `python scripts/gone.py` `train.py` "
        "`test_gone.py` `test_train.py` `tests/test_train.py`"
    )
    assert missing(document) == ["gone.md", "scripts/gone.py", "test_gone.py"]
