"""The plugin in real processes: what it costs off, what it says on, and that it never stops a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
from pool import RankPool, environment
from stand_in import MAGI2, MODULES, changed, fresh_plugin, snapshot

from vllm_musa_headpar import config, log, plugin
from vllm_musa_headpar.diagnosis import MUSA_RECORDS
from vllm_musa_headpar.host.stock import signature_of, why_not_stock

pytestmark = pytest.mark.cpu

FLAG = config.FLAG


def in_process(code: str, **variables: str) -> tuple[Any, str]:
    """Run code in a fresh interpreter; what it passed to `answer`, and all that it printed besides."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    script = "import json\ndef answer(value): print('ANSWER', json.dumps(value), flush=True)\n" + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**plain, "HF_HUB_OFFLINE": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert len(answers) == 1, done.stdout
    rest = "\n".join(line for line in done.stdout.splitlines() if line not in answers)
    return json.loads(answers[0].removeprefix("ANSWER ")), rest


OFF = """
    import os, sys
    import vllm_musa_headpar
    imported = lambda: sorted({"torch", "torchada", "vllm", "vllm_omni"} & set(sys.modules))
    public = vllm_musa_headpar.__all__
    seen = {"package": imported(), "listed": sorted(set(public) - set(dir(vllm_musa_headpar)))}
    from vllm_musa_headpar import register
    for value in (None, "", "0", "false", "off", "no", " OFF ", "2"):
        os.environ.pop("VLLM_MUSA_HEADPAR", None)
        if value is not None:
            os.environ["VLLM_MUSA_HEADPAR"] = value
        register()
        register()
        seen[repr(value)] = imported()
    answer(seen)
"""


def test_off_costs_nothing_and_a_bad_value_is_said_once() -> None:
    seen, log = in_process(OFF)
    assert seen == {key: [] for key in seen}
    assert len(seen) == 10
    assert log.splitlines() == [
        "VLLM_MUSA_HEADPAR='2' is not allowed and counts as off: expected "
        "unset, 0, false, off or no for off; 1, true, on or yes for on; or strict"
    ]


@pytest.mark.parametrize("value", ["1", "true", "on", "yes", "TRUE", " 1 "])
def test_values_for_on(value: str) -> None:
    settings = config.read({FLAG: value})
    assert (settings.enabled, settings.strict, settings.problems) == (True, False, ())


def test_values_for_strict_and_the_other_variables() -> None:
    settings = config.read({FLAG: "strict", config.EXCHANGE: " p2p ", config.CHECK: "1"})
    assert settings == config.Settings(True, True, "p2p", True)
    assert config.read({FLAG: "1", config.EXCHANGE: ""}).exchange == "auto"
    assert config.read({FLAG: "1", config.EXCHANGE: " AUTO "}).exchange == "auto"
    bad = config.read({FLAG: "1", config.CHECK: "maybe"})
    assert (bad.enabled, bad.check) == (True, False)
    assert bad.problems == ("VLLM_MUSA_HEADPAR_CHECK='maybe' is not allowed and counts as off: expected 1 or 0",)


def test_every_public_name_resolves() -> None:
    import vllm_musa_headpar

    for name in vllm_musa_headpar.__all__:
        assert getattr(vllm_musa_headpar, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        vllm_musa_headpar.nothing  # noqa: B018


WORKER = """
    import sys
    order = []
    class Watch:
        def find_spec(self, name, path=None, target=None):
            if name in ("torch", "torchada", "vllm_omni", "vllm_musa_headpar.exchange"):
                order.append(name)
    sys.meta_path.insert(0, Watch())
    from vllm_omni.plugins import load_omni_general_plugins
    load_omni_general_plugins()
    load_omni_general_plugins()
    from vllm_musa_headpar import register, report
    register()
    answer({"order": order, "statuses": {record.name: record.status for record in report()}})
"""


def test_a_worker_process_says_once_that_it_is_on() -> None:
    """A spawned process that loads plugins as vLLM-Omni's diffusion worker does."""
    seen, log = in_process(WORKER, VLLM_MUSA_HEADPAR="1")
    lines = [line for line in log.splitlines() if "vllm-musa-headpar" in line]
    assert len(lines) == 1, log
    assert lines[0].startswith("INFO ")
    assert "is on: exchange auto; patched head_parallel.publish, magi2.ep_dispatch" in lines[0]
    unneeded = [name for name, status in seen["statuses"].items() if status == "not needed"]
    assert set(unneeded) == {"head_parallel.bridge", "magi2.attention_shards", *MUSA_RECORDS}
    assert set(seen["statuses"].values()) == {"applied", "not needed"}
    assert "Unknown vLLM environment variable" not in log
    # torch is vLLM's own doing; torchada comes before anything of ours that needs torch.
    assert seen["order"].index("torchada") < seen["order"].index("vllm_musa_headpar.exchange")


FORKED = """
    import multiprocessing, os, sys
    def child(generation):
        from vllm_musa_headpar import register
        register()
        if generation:
            again = multiprocessing.get_context("fork").Process(target=child, args=(generation - 1,))
            again.start()
            again.join()
    if __name__ == "__main__":
        from vllm_omni.plugins import load_omni_general_plugins
        load_omni_general_plugins()
        from vllm_musa_headpar import plugin
        if os.environ.pop("UNDO", None):
            plugin.undo()
            del os.environ["VLLM_MUSA_HEADPAR"]
        child(2)
        answer(os.getpid())
"""


def test_every_forked_process_says_once_that_it_is_on() -> None:
    """vLLM's loader does nothing in a forked process, which has the patches all the same."""
    _, log = in_process(FORKED, VLLM_MUSA_HEADPAR="1")
    lines = [line.partition("vllm-musa-headpar ")[2] for line in log.splitlines() if "vllm-musa-headpar" in line]
    assert len(lines) == 3, log
    assert len(set(lines)) == 1
    assert "is on: exchange auto; patched head_parallel.publish, magi2.ep_dispatch" in lines[0]


def test_a_forked_process_says_what_is_wrong_too_and_nothing_where_nothing_is_on() -> None:
    _, log = in_process(FORKED, VLLM_MUSA_HEADPAR="1", VLLM_MUSA_HEADPAR_CHECK="maybe")
    assert log.count("VLLM_MUSA_HEADPAR_CHECK='maybe' is not allowed") == log.count("is on: ") == 3, log
    _, log = in_process(FORKED, VLLM_MUSA_HEADPAR="0")
    assert "vllm-musa-headpar" not in log
    _, log = in_process(FORKED, VLLM_MUSA_HEADPAR="1", UNDO="1")
    assert log.count("is on: ") == 1, "what was taken back is not on in the children"


def pickled_by_reference(rank: int, nproc: int, store: str) -> None:
    """Every function in the place of a stock one pickles to the very bytes of stock's, and back to itself."""
    import copy
    import pickle

    import cloudpickle

    _, omni_plugins = loaders()
    magi2_modules()
    with environment(VLLM_MUSA_HEADPAR="strict"), fresh_plugin():
        omni_plugins.load_omni_general_plugins()
        ledger = plugin._ledger
        assert ledger is not None
        bindings = [binding for entry in ledger._entries for binding in entry.applied]
        functions = [binding for binding in bindings if isinstance(binding.original, FunctionType)]
        assert len(functions) >= 8
        stored = []
        for binding in functions:
            patched, stock = binding.replacement, binding.original
            names = ("__module__", "__qualname__", "__name__")
            assert [getattr(patched, name) for name in names] == [getattr(stock, name) for name in names]
            for pickler in (pickle, cloudpickle):
                stored.append((binding, pickler.dumps(patched)))
                assert pickler.loads(stored[-1][1]) is patched
            assert copy.deepcopy(patched) is patched
            if isinstance(binding.owner, ModuleType):
                assert not hasattr(patched, "__wrapped__"), "nothing is laid over the stock function"
                assert why_not_stock(patched, sys.modules[stock.__module__], signature_of(stock), None) is not None
    for binding, data in stored:
        assert pickle.loads(data) is binding.original, "a process without the patch gets the stock function"


def test_patched_functions_are_pickled_as_stocks_are(ranks: RankPool) -> None:
    ranks(pickled_by_reference, 1)


def test_our_public_functions_keep_their_names() -> None:
    """On a newer host they are put in place of the host's as they are."""
    from vllm_musa_headpar import exchange
    from vllm_musa_headpar.host.ledger import carry_names

    def stock(tensor: Any, group: Any, layout: Any) -> Any:
        """The host's."""

    def made_for_it(tensor: Any, group: Any, layout: Any) -> Any:
        """Ours."""

    ours = exchange.scatter_heads_gather_tokens
    carry_names(stock, ours)
    assert (ours.__module__, ours.__name__) == ("vllm_musa_headpar.exchange", "scatter_heads_gather_tokens")
    carry_names(stock, made_for_it)
    assert (made_for_it.__name__, made_for_it.__qualname__) == ("stock", stock.__qualname__)


TORCHADA_FIRST = """
    import sys
    order = []
    class Watch:
        def find_spec(self, name, path=None, target=None):
            if name in ("torch", "torchada", "vllm", "vllm_omni"):
                order.append(name)
    sys.meta_path.insert(0, Watch())
    from vllm_musa_headpar import register, report
    register()
    statuses = sorted({record.status for record in report()})
    answer({"order": order, "statuses": statuses, "reason": report()[0].reason})
"""


def test_called_first_it_imports_torchada_before_torch_and_no_host() -> None:
    seen, _ = in_process(TORCHADA_FIRST, VLLM_MUSA_HEADPAR="1")
    assert seen["order"] == ["torchada", "torch"]
    assert seen["statuses"] == ["pending"]
    assert seen["reason"] == "vllm_omni is not loaded in this process"


LLM_ONLY = """
    import os, sys
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    import vllm.envs as envs
    seen = {"omni": "vllm_omni" in sys.modules, "known": {}}
    from vllm_musa_headpar.config import VARIABLES
    seen["known"] = {name: envs.environment_variables[name]() for name in VARIABLES}
    seen["attribute"] = envs.VLLM_MUSA_HEADPAR
    envs.validate_environ(True)
    from vllm_musa_headpar import report
    if os.environ["VLLM_MUSA_HEADPAR"] == "1":
        seen["before"] = sorted({record.status for record in report()})
        from vllm_omni.plugins import load_omni_general_plugins
        load_omni_general_plugins()
        seen["after"] = {record.name: record.status for record in report()}
    for name in VARIABLES:
        del os.environ[name]
    envs.enable_envs_cache()
    seen["unset"] = envs.VLLM_MUSA_HEADPAR
    answer(seen)
"""


@pytest.mark.parametrize("flag", ["1", "0"])
def test_vllm_knows_the_variables_on_and_off_and_a_process_without_diffusion_stays_so(flag: str) -> None:
    variables = {FLAG: flag, config.EXCHANGE: "auto", config.CHECK: "0", config.PROFILE: "measured.json"}
    # vllm-omni's own plugin would import it: it is not on this list.
    seen, log = in_process(LLM_ONLY, VLLM_PLUGINS="musa_headpar", **variables)
    assert seen["omni"] is False
    assert seen["known"] == variables
    assert (seen["attribute"], seen["unset"]) == (flag, None)
    said = [line for line in log.splitlines() if "vllm-musa-headpar" in line]
    if flag == "0":
        assert said == []
        return
    assert seen["before"] == ["pending"]
    unneeded = [name for name, status in seen["after"].items() if status == "not needed"]
    assert set(unneeded) == {"head_parallel.bridge", "magi2.attention_shards", *MUSA_RECORDS}
    assert set(seen["after"].values()) == {"applied", "not needed"}
    assert len(said) == 1
    assert "waiting: vllm_omni is not loaded in this process" in said[0]


def loaders() -> Any:
    """vLLM's and vLLM-Omni's loaders, as if not called yet."""
    import vllm.plugins
    import vllm_omni.plugins

    vllm.plugins.plugins_loaded = False
    vllm_omni.plugins.omni_plugins_loaded = False
    return vllm.plugins, vllm_omni.plugins


def magi2_modules() -> list[Any]:
    from importlib import import_module

    modules = [import_module(f"{MAGI2}.{name}") for name in MODULES]
    return [*modules, modules[1].Magi2MultiHeadMoE, modules[3].Magi2TransformerLayer]


def either_group(rank: int, nproc: int, store: str) -> None:
    vllm_plugins, omni_plugins = loaders()
    owners = magi2_modules()
    before = snapshot(*owners)
    groups = {
        "vllm.general_plugins": vllm_plugins.load_plugins_by_group,
        "vllm_omni.general_plugins": omni_plugins.load_omni_plugins_by_group,
    }
    for order in (list(groups), list(reversed(groups))):
        with environment(VLLM_MUSA_HEADPAR="strict"), fresh_plugin() as told:
            for number, group in enumerate(order):
                groups[group](group)["musa_headpar"]()
                if number == 0:
                    first = changed(before, *owners)
                    held = snapshot(*owners)
            assert first
            assert changed(held, *owners) == set(), "the second call changed something"
            assert [level for level, _ in told] == ["INFO"], order
        assert changed(before, *owners) == set()


def test_either_group_may_come_first(ranks: RankPool) -> None:
    ranks(either_group, 1)


def stock_when_unset(rank: int, nproc: int, store: str) -> None:
    from vllm_musa_headpar.host.stock import fingerprint_of

    _, omni_plugins = loaders()
    owners = magi2_modules()
    before = snapshot(*owners)
    with environment(), fresh_plugin() as told:
        omni_plugins.load_omni_general_plugins()
        assert changed(before, *owners) == set()
        assert told == []
        assert {record.status for record in plugin.report()} == {"off"}
    parallel, moe = owners[0], owners[1]
    assert moe.ep_dispatch is parallel.ep_dispatch
    assert parallel.ep_dispatch.__module__ == parallel.__name__
    assert fingerprint_of(parallel.ep_dispatch) == "b17c2f13713e39c0"


def test_unset_magi2_has_its_stock_functions(ranks: RankPool) -> None:
    ranks(stock_when_unset, 1)


# VLLM_PLUGINS and whether ours loads under it
ALLOW_LISTS = {
    None: True,
    "musa_headpar": True,
    "musa,musa_custom_ops,musa_headpar": True,
    "musa,musa_custom_ops": False,
    "musa, musa_headpar": False,
    "musa_headpar ": False,
    "": False,
    " ": False,
    ",musa_headpar": True,
}


def allow_lists(rank: int, nproc: int, store: str) -> None:
    """What vLLM's loaders do, and that the doctor says the same and gives a line that works."""
    from vllm_musa_headpar.diagnosis import check_allow_list

    vllm_plugins, omni_plugins = loaders()
    for value, loads in ALLOW_LISTS.items():
        check = check_allow_list(value)
        lists = [value]
        if not loads:
            assert check.verdict == "problem", value
            line = check.todo.split("export VLLM_PLUGINS=")[1].split(" ")[0].rstrip(",")
            lists.append(line)
        else:
            assert check.verdict in ("ok", "warning"), value
        for number, names in enumerate(lists):
            with environment(**({} if names is None else {"VLLM_PLUGINS": names})):
                ours = "musa_headpar" in vllm_plugins.load_plugins_by_group("vllm.general_plugins")
                omni = "musa_headpar" in omni_plugins.load_omni_plugins_by_group("vllm_omni.general_plugins")
            assert ours == omni == (loads or number == 1), names


def test_vllm_plugins_allows_what_the_doctor_says(ranks: RankPool) -> None:
    ranks(allow_lists, 1)


@pytest.fixture
def torchada(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A torchada whose answers a test can choose, in a process that has not loaded a host."""
    monkeypatch.delitem(sys.modules, "vllm_omni", raising=False)
    fake = SimpleNamespace(is_musa_platform=lambda: False, is_patched=lambda: False)
    monkeypatch.setitem(sys.modules, "torchada", fake)  # type: ignore[arg-type]
    return fake


def expect_off(monkeypatch: pytest.MonkeyPatch, expected: str) -> None:
    """One warning, nothing raised; in strict mode one error."""
    monkeypatch.setenv(FLAG, "1")
    with fresh_plugin() as told:
        plugin.register()
        plugin.register()
        assert [level for level, _ in told] == ["WARNING"], told
        assert expected in told[0][1]
    monkeypatch.setenv(FLAG, "strict")
    with fresh_plugin() as told:
        with pytest.raises(plugin.StrictModeError, match=expected):
            plugin.register()
        assert told == []


def test_a_torchada_that_fits(torchada: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    torchada.is_musa_platform = torchada.is_patched = lambda: True
    monkeypatch.setenv(FLAG, "strict")
    with fresh_plugin() as told:
        plugin.register()
        assert [level for level, _ in told] == ["INFO"]


def test_torch_not_patched_on_musa(torchada: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    torchada.is_musa_platform = lambda: True
    expect_off(monkeypatch, "torchada has not patched torch on this MUSA platform")


def test_torchada_that_raises(torchada: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bool:
        raise OSError("no driver")

    torchada.is_musa_platform = broken
    expect_off(monkeypatch, "the plugin could not be switched on: OSError: no driver")


def test_torchada_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchada", None)  # type: ignore[arg-type]
    expect_off(monkeypatch, "torchada cannot be imported")


def test_torchada_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import torchada

    monkeypatch.setattr(torch, "musa", SimpleNamespace(is_initialized=lambda: True), raising=False)
    for value, error in (("1", None), ("strict", plugin.StrictModeError)):
        monkeypatch.setenv(FLAG, value)
        monkeypatch.delitem(sys.modules, "torchada")
        with fresh_plugin() as told:
            if error is None:
                plugin.register()
                assert "initialised before torchada was imported" in told[0][1]
                assert "torchada" not in sys.modules  # it would have patched a torch in use
            else:
                with pytest.raises(error, match="initialised before torchada was imported"):
                    plugin.register()
        monkeypatch.setitem(sys.modules, "torchada", torchada)


@pytest.mark.parametrize("broken", ["vllm_musa_headpar.host.magi2", "vllm_musa_headpar.host"])
def test_a_part_of_ours_that_cannot_be_imported(
    torchada: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    import vllm_musa_headpar

    monkeypatch.setattr(plugin, "_ledger", None)
    monkeypatch.setattr(log, "_said", set())

    for name in [name for name in sys.modules if name == broken or name.startswith(f"{broken}.")]:
        monkeypatch.delitem(sys.modules, name)
    for parent in (vllm_musa_headpar, sys.modules.get("vllm_musa_headpar.host")):
        name = broken.rpartition(".")[2]
        if parent is not None and hasattr(parent, name):
            monkeypatch.delattr(parent, name)
    monkeypatch.setitem(sys.modules, broken, None)  # type: ignore[arg-type]
    monkeypatch.setenv(FLAG, "1")
    plugin.register()
    plugin.register()
    assert len(caplog.messages) == 1
    assert "the plugin could not be switched on" in caplog.messages[0]
    monkeypatch.setenv(FLAG, "strict")
    with pytest.raises(plugin.StrictModeError, match="could not be switched on"):
        plugin.register()


def test_getters_never_raise_and_keep_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {FLAG: "theirs"}
    monkeypatch.setitem(sys.modules, "vllm.envs", SimpleNamespace(environment_variables=known))  # type: ignore[arg-type]
    for name in config.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    plugin.register()
    assert known.pop(FLAG) == "theirs"
    ours = (config.EXCHANGE, config.CHECK, config.PROFILE)
    assert {name: getter() for name, getter in known.items()} == dict.fromkeys(ours)
    monkeypatch.setitem(sys.modules, "vllm.envs", SimpleNamespace())  # type: ignore[arg-type]
    plugin.register()


def test_strict_refuses_a_bad_value_of_another_variable(
    torchada: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FLAG, "strict")
    monkeypatch.setenv(config.CHECK, "maybe")
    with (
        fresh_plugin() as told,
        pytest.raises(plugin.StrictModeError, match=r"'maybe' is not allowed.*expected 1 or 0"),
    ):
        plugin.register()
    assert [level for level, _ in told] == ["INFO"]
