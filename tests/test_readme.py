"""The two READMEs say the same, and the figure is what its script draws."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from vllm_musa_headpar import config

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[1]
ENGLISH = (ROOT / "README.md").read_text()
CHINESE = (ROOT / "README_CN.md").read_text()
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()


def commands(text: str) -> list[list[str]]:
    """The code blocks as lines without the comments, which are in the reader's language."""
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [[re.sub(r"\s+# .*", "", line) for line in block.splitlines()] for block in blocks]


def rows(text: str) -> list[list[str]]:
    """The cells of every row of every table."""
    return [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]


def in_code(cell: str) -> list[str]:
    return re.findall(r"`(.*?)`", cell)


def variables(text: str) -> list[tuple[list[str], list[str]]]:
    """Names and values from the table of variables."""
    table = rows(text)
    first = next(number for number, cells in enumerate(table) if in_code(cells[0]) == [config.FLAG])
    found = []
    for cells in table[first:]:
        if cells[0].strip() and not cells[0].strip().startswith("`VLLM_"):
            break
        found.append((in_code(cells[0]), in_code(cells[1])))
    return found


def test_every_command_is_in_both() -> None:
    ours = commands(CHINESE)
    assert len(ours) == 4
    theirs = commands(ENGLISH)
    assert [block for block in theirs if block in ours] == ours
    first_screen = commands(ENGLISH.split("\n## ")[0])
    assert ours[: len(first_screen)] == first_screen


def test_the_tables_of_variables_have_the_same_names_and_values() -> None:
    found = variables(ENGLISH)
    assert found == variables(CHINESE)
    assert {name for names, _ in found for name in names} == set(config.VARIABLES)


def test_every_variable_named_anywhere_exists() -> None:
    for text in (ENGLISH, CHINESE, TROUBLES):
        assert set(re.findall(r"VLLM_MUSA_HEADPAR\w*", text)) <= set(config.VARIABLES)


def test_troubleshooting_begins_alike() -> None:
    """What a reader searches for: the messages, word for word."""
    chinese = rows(CHINESE.split("## 常见问题")[1])[2:]
    english = rows(TROUBLES)[2:]
    assert len(chinese) >= 6
    for ours, theirs in zip(chinese, english, strict=False):
        assert re.findall(r'"(.*?)"', ours[0]) == re.findall(r'"(.*?)"', theirs[0])
        assert in_code(ours[2]) == [code for code in in_code(theirs[2]) if code]


def test_every_file_that_is_linked_exists() -> None:
    for text in (ENGLISH, CHINESE):
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert target.startswith("http") or (ROOT / target).exists(), target


def test_the_figure_is_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = tmp_path / "exchange.svg"
    monkeypatch.setattr(sys, "argv", ["figure.py", str(drawn)])
    runpy.run_path(str(ROOT / "docs" / "figure.py"), run_name="__main__")
    assert drawn.read_text() == (ROOT / "docs" / "exchange.svg").read_text()
