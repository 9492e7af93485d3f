"""The command line: what it takes and refuses, in which words, and what it prints where."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from vllm_musa_headpar import __version__, cli
from vllm_musa_headpar.bench import exchange, rounds, show
from vllm_musa_headpar.bench.exchange import Case, CaseReport, LineReport, Report
from vllm_musa_headpar.bench.rounds import Spread, ticks
from vllm_musa_headpar.cli.arguments import require_writable
from vllm_musa_headpar.testing.ranks import RENDEZVOUS, RankFailure

pytestmark = pytest.mark.cpu


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a usage error says in its last line."""
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("value", ["nan", "-5", "inf", "-inf", "0", "0.5", "1e300", "ten", ""])
@pytest.mark.parametrize("command", ["bench", "selftest"])
def test_times_that_nobody_can_wait(command: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, command, f"--timeout={value}")
    assert told == (
        f"vllm-musa-headpar {command}: error: argument --timeout: "
        f"expected a number of seconds from 1 to 604800 (a week), got {value!r}"
    )


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        *(("--rounds", value, "a whole number of at least 1") for value in ("1.5", "0", "-1", "x", "", "nan", "1e3")),
        *(("--nproc", value, "a whole number of at least 1") for value in ("0", "2.0", "two")),
        *(("--heads", value, "a whole number of at least 1") for value in ("0", "1/2")),
        *(("--dim", value, "a whole number of at least 1") for value in ("0", "0x10")),
        *(("--tokens", value, "a whole number of at least 0") for value in ("-1", "3.7", "many")),
        *(
            ("--counts", value, "whole numbers of at least 0 with commas between them")
            for value in ("", "1,", "1;2", "1,-2", "1,x", "1.0,2")
        ),
    ],
)
def test_numbers_that_are_none(option: str, value: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "bench", f"{option}={value}")
    assert told == f"vllm-musa-headpar bench: error: argument {option}: expected {expected}, got {value!r}"


def options() -> list[tuple[str, argparse.Action]]:
    found = []
    for command in cli.COMMANDS:
        parser = argparse.ArgumentParser()
        import_module(f"vllm_musa_headpar.cli.{command}").add_arguments(parser)
        found += [(command, action) for action in parser._actions if callable(action.type)]
    return found


@pytest.mark.parametrize(("command", "action"), options(), ids=lambda value: getattr(value, "dest", value))
def test_no_option_of_any_command_shows_names_from_the_code(command: str, action: argparse.Action) -> None:
    """Of any other exception than this one argparse tells the name of the function that raised it."""
    assert callable(action.type)
    for text in ("", " ", "x", "-1", "0", "1.5", "nan", "inf", "1,2", "a,b", ",", "\0", "9" * 5000, "é"):
        try:
            action.type(text)
        except argparse.ArgumentTypeError as error:
            told = str(error)
        else:
            continue
        assert told.startswith("expected "), (command, action.dest, text)


def run(*arguments: str, code: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """`python -m vllm_musa_headpar`, or other code with these arguments."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    command = ["-c", code] if code else ["-m", "vllm_musa_headpar"]
    return subprocess.run(
        [sys.executable, *command, *arguments],
        env={**plain, **variables},
        capture_output=True,
        text=True,
        timeout=150,
    )


def test_the_version_and_the_module_as_a_command() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"vllm-musa-headpar {__version__}\n")
    done = run("bench", "--exchange", "nothing")
    assert done.returncode == 2
    assert done.stderr.startswith("vllm-musa-headpar bench: ")
    assert run().returncode == 2


WITHOUT = """
import sys
sys.modules[sys.argv.pop(1)] = None
from vllm_musa_headpar.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("command", [command for command in cli.COMMANDS if command not in cli.WITHOUT_TORCH])
def test_a_machine_without_torch(command: str) -> None:
    done = run("torch", command, code=WITHOUT)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"vllm-musa-headpar {command}: torch cannot be imported (ModuleNotFoundError: ")
    assert run("torch", command, "--help", code=WITHOUT).returncode == 0


def test_a_target_that_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    require_writable("--json", str(tmp_path / "new"))
    assert list(tmp_path.iterdir()) == []
    there = tmp_path / "there"
    there.write_text("kept")
    require_writable("--json", str(there))
    assert there.read_text() == "kept"
    require_writable("--json", os.devnull)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("folder", "it is a folder"),
        ("missing/file.json", "there is no folder {folder}/missing"),
        ("file/file.json", "there is no folder {folder}/file"),
        ("x" * 300, "file name too long"),
        ("/proc/file.json", "no such file or directory"),  # what nobody may write, root included
    ],
)
def test_a_target_that_cannot_be_written_is_said_before_measuring(
    tmp_path: Path, target: str, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr(exchange, "run", None)  # measuring would fail
    path = str(tmp_path / target)
    for option in ("--json", "--plot"):
        assert cli.main(["bench", option, path]) == 2
        told = f"vllm-musa-headpar bench: {option} {path} cannot be written: {reason.format(folder=tmp_path)}\n"
        assert capsys.readouterr().err == told


def test_a_picture_of_an_unknown_kind_is_said_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("times.xyz", "times"):
        assert cli.main(["bench", "--plot", str(tmp_path / name)]) == 2
        assert "expected a name that ends in one of ." in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def report_of(ratios: dict[str, float], total: int = 3702, ms: float = 20.0) -> Report:
    """A report as if measured, with these speeds relative to stock."""
    cases = []
    for tokens in ticks(total):

        def spread(share: float, took: float) -> Spread:
            return Spread(took * share, took * share * 0.9, took * share * 1.2)

        lines = []
        for name, ratio in ratios.items():
            took = ms * tokens / total / ratio
            counts = {
                "bytes_between_ranks": [tokens * 3072] * 2,
                "bytes_copied": [tokens * 6144] * 2,
                "launches": [3] * 2,
            }
            lines.append(
                LineReport(
                    name,
                    spread(0.5, took),
                    spread(0.5, took),
                    spread(1, took),
                    ratio,
                    ratio / 2,
                    {"dispatch": counts, "return": counts},
                )
            )
        payload = [tokens * 6144] * 2
        cases.append(CaseReport(Case((tokens, tokens), 12, 256, "bfloat16"), payload, payload, payload, lines))
    return Report({"backend": "gloo", "device": "cpu", "ranks": 2}, 30, cases, "all_to_all")


RATIOS = {"stock": 1.0, "all_to_all": 1.02, "p2p": 1.31, "bare collective": 2.5}


@pytest.mark.parametrize("ms", [0.05, 20.0, 123456.7])
@pytest.mark.parametrize("columns", [40, 60, 80, 100, 120, 200])
def test_a_number_in_a_table_is_whole_or_its_column_is_absent(
    columns: int, ms: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    report = report_of(RATIOS, ms=ms)
    report = replace(report, cases=report.cases[-1:])
    show.print_report(report)
    told = capsys.readouterr().out
    lines = told.splitlines()
    assert "…" not in told
    assert max(map(len, lines)) <= columns
    last = report.cases[-1].lines
    cells = {
        "dispatch": [show.spread(line.dispatch) for line in last],
        "return": [show.spread(line.back) for line in last],
        "both": [show.spread(line.round_trip) for line in last],
        "x stock": [f"{line.times_stock:.2f}" for line in last],
        "x bare": [f"{line.times_bare:.2f}" for line in last],
        "MB sent": ["11.4+11.4"],
        "MB copied": ["22.7+22.7"],
        "launches": ["3+3"],
    }
    heading = lines[next(number for number, line in enumerate(lines) if line.startswith(" ──")) - 1]
    caption = " ".join(told.split())
    absent = [name for name in cells if name not in heading]
    if ms <= 20:
        assert (columns < 120) == bool(absent), "at 120 columns nothing is missing"
    assert absent == list(cells)[len(cells) - len(absent) :]
    assert not absent or f"For want of width without: {', '.join(absent)} (--json has all)." in caption
    words = told.replace("[", " ").split()
    for name, texts in cells.items():
        for text in texts if name not in absent else []:
            for number in text.replace("[dim]", "").replace("[/dim]", "").split():
                assert number in words, (name, number)
    assert all(name in told for name in RATIOS)


def test_a_name_gives_way_before_a_number_does(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    name = "an_exchange_with_a_very_long_name_of_someone_else"
    show.print_report(report_of({**RATIOS, name: 1.5}))
    told = capsys.readouterr().out
    assert "…" not in told
    assert name in "".join(told.split())
    assert "6.67" in told.split()


@pytest.mark.parametrize(
    "ratios", [RATIOS, {f"exchange {number}": 1 + number / 500 for number in range(9)}, {"stock": 1.0, "p2p": 0.001}]
)
@pytest.mark.parametrize("ms", [0.002, 20.0, 9000.0])
def test_no_two_labels_of_the_plot_overlap(ratios: dict[str, float], ms: float) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = show.draw(report_of({"stock": 1.0, **ratios}, ms=ms))
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    for axes in figure.axes:
        texts = [*axes.get_xticklabels(), *axes.get_yticklabels(), *axes.texts, axes.title]
        labels = [text for text in texts if text.get_text() and text.get_visible()]
        boxes = [text.get_window_extent(renderer) for text in labels]
        for number, box in enumerate(boxes):
            for other, with_text in zip(boxes[number + 1 :], labels[number + 1 :], strict=True):
                assert not box.overlaps(other), (labels[number].get_text(), with_text.get_text())
    assert len(figure.axes[1].texts) == len({"stock", *ratios})


def test_a_long_run_through_a_pipe_says_now_and_then_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr(rounds.time, "monotonic", lambda: float(next(clock)))
    world: Any = argparse.Namespace(rank=0)
    with rounds.progress(world, "2 ranks, gloo", 9) as advance:
        for _ in range(9):
            advance()
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "2 ranks, gloo: 0 of 9 rounds, 4 s"
    assert 2 <= len(told) - 1 <= 4, "a line every ten seconds or so, not one a round"
    assert told == sorted(told)
    assert all(line.startswith("2 ranks, gloo: ") and " of 9 rounds, " in line for line in told)
    with rounds.progress(argparse.Namespace(rank=1), "2 ranks, gloo", 9) as advance:
        advance()
    assert capsys.readouterr().err == ""


MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # where nothing listens
UNSET = "unset RANK and WORLD_SIZE to have the ranks spawned here"


@pytest.mark.parametrize(
    ("left_over", "told"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK='0', WORLD_SIZE='2' but no MASTER_ADDR and no MASTER_PORT in the env"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_PORT='1' but no MASTER_ADDR in the environment"),
        ({"RANK": "x", "WORLD_SIZE": "2", **MASTER}, "RANK='x', WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT="),
        ({"RANK": "", "WORLD_SIZE": "2", **MASTER}, "where RANK is no whole number of at least 0"),
        ({"RANK": "-1", "WORLD_SIZE": "2", **MASTER}, "where RANK is no whole number of at least 0"),
        ({"RANK": "0", "WORLD_SIZE": "two", **MASTER}, "where WORLD_SIZE is no whole number of at least 0"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "x", **MASTER}, "where LOCAL_RANK is no whole number of at l"),
        ({"RANK": "0", "WORLD_SIZE": "2", **MASTER, "MASTER_PORT": "2x"}, "where MASTER_PORT is no whole number of at"),
        ({"RANK": "2", "WORLD_SIZE": "2", **MASTER}, "where RANK is not below WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "1", **MASTER}, "an exchange needs at least 2 ranks, got 1 from WORLD_SIZE"),
        # Nobody to meet there: said at the latest after the timeout, with the cause last.
        (
            {"RANK": "1", "WORLD_SIZE": "2", **MASTER},
            "2 ranks could not meet over gloo, with RANK='1', WORLD_SIZE='2', ",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", **MASTER, "MASTER_PORT": "taken"},
            "2 ranks could not meet over gloo, with RANK",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2", **MASTER, "MASTER_PORT": "free"}, "1/2 clients joined"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", **MASTER, "MASTER_PORT": "99999"},
            "MASTER_PORT='99999' in the environment: ",
        ),
    ],
)
@pytest.mark.parametrize("kind", [(), ("--layer",)], ids=["exchange", "layer"])
def test_a_rendezvous_left_over_in_the_environment_ends_in_a_sentence(
    kind: tuple[str, ...],
    left_over: dict[str, str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in (*RENDEZVOUS, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if left_over.get("MASTER_PORT") == "free":
            server.close()
        for name, value in left_over.items():
            monkeypatch.setenv(name, str(port) if value in ("taken", "free") else value)
        assert cli.main(["bench", *kind, "--tokens", "4", "--timeout", "1"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("vllm-musa-headpar bench: ")
    assert told in lines[-1]
    assert UNSET in lines[-1]
    assert "Traceback" not in "".join(lines)


@pytest.mark.slow
def test_ranks_that_are_spawned_do_not_look_at_what_torchrun_left(tmp_path: Path) -> None:
    left_over = {"RANK": "7", "LOCAL_RANK": "x", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "x"}
    done = run("bench", "--tokens", "4", "--rounds", "1", "--timeout", "120", **left_over)
    assert done.returncode == 0, done.stderr
    assert "2 ranks, gloo: 0 of 3 rounds" in done.stderr
    assert UNSET not in done.stderr
    done = run("selftest", **left_over)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("PASS ")


@pytest.mark.slow
@pytest.mark.parametrize("command", [("bench", "--tokens", "4"), ("selftest",)], ids=["bench", "selftest"])
def test_a_wrong_network_interface_ends_in_a_sentence_with_the_cause_last(command: tuple[str, ...]) -> None:
    done = run(*command, "--timeout", "60", GLOO_SOCKET_IFNAME="nothing0")
    assert done.returncode == 1
    told = done.stdout if command == ("selftest",) else done.stderr
    last = told.splitlines()[-1]
    sentence = "2 ranks could not meet over gloo, with GLOO_SOCKET_IFNAME='nothing0' in the environment: "
    assert sentence in last
    assert last.endswith("Unable to find address for: nothing0")
    assert "Traceback" not in done.stdout + done.stderr


def test_the_cause_of_a_failure_is_the_first_ranks_error() -> None:
    traceback = "Traceback (most recent call last):\n  File\nsome.CommError: lost\nException raised from x\nframe #0: y"
    failure = RankFailure({2: traceback, 0: "the process died with exit code -9", 1: traceback})
    assert failure.cause == "rank 2: some.CommError: lost"
    assert str(failure) == f"rank 0: the process died with exit code -9\nranks 1, 2: {traceback}"
    assert RankFailure({0: "2 ranks could not meet: why"}).cause == "rank 0: 2 ranks could not meet: why"
