"""A host that has changed since the patches were written: what does not fit is left alone, and said.

The changed modules are copies of the real ones on disk, imported in place of them.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import tempfile
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pool import RankPool, environment
from stand_in import MAGI2, changed, fresh_plugin, modified_magi2, snapshot

from vllm_musa_headpar.host.stock import fingerprint

pytestmark = pytest.mark.cpu

# Record -> the attributes that it gives other values on stock 0.30.0, modules and classes by name.
ATTRIBUTES = {
    "magi2.ep_dispatch": {(f"{MAGI2}.parallel", "ep_dispatch"), (f"{MAGI2}.mh_moe", "ep_dispatch")},
    "magi2.ep_undispatch": {(f"{MAGI2}.parallel", "ep_undispatch"), (f"{MAGI2}.mh_moe", "ep_undispatch")},
    "magi2.known_counts": {("Magi2TransformerLayer", "forward")},
    "magi2.moe_forward": {("Magi2MultiHeadMoE", "forward")},
    "magi2.attention_dispatch": {
        (f"{MAGI2}.parallel", "scatter_heads_gather_seqlen"),
        (f"{MAGI2}.attention", "scatter_heads_gather_seqlen"),
    },
    "magi2.attention_return": {
        (f"{MAGI2}.parallel", "scatter_seqlen_gather_heads"),
        (f"{MAGI2}.attention", "scatter_seqlen_gather_heads"),
    },
}
# The MoE forward's patch goes past these two, so it must not be applied where they are not the stock ones.
MOE = {"magi2.moe_forward"}

Edits = list[tuple[str, str, str, str]]  # file, function ("" for the whole file), old text, new text


def host_source(file: str) -> str:
    import vllm_omni.diffusion.models.magi2 as package

    return Path(package.__path__[0], file).read_text()


def edit(source: str, function: str, old: str, new: str) -> str:
    """Replace text, within one function only if it is named; an empty `old` appends."""
    if not old:
        return source + "\n\n" + textwrap.dedent(new)
    if not function:
        assert old in source, old
        return source.replace(old, new)
    text = function_text(source, function)
    assert old in text, (function, old)
    return source.replace(text, text.replace(old, new))


def function_text(source: str, name: str) -> str:
    owner, _, function = name.rpartition(".")
    body = ast.parse(source).body
    if owner:
        body = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == owner).body
    node = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == function)
    return "".join(source.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno])


def sources(edits: Edits) -> dict[str, str]:
    changed_files: dict[str, str] = {}
    for file, function, old, new in edits:
        changed_files[file] = edit(changed_files.get(file) or host_source(file), function, old, new)
    return changed_files


def owners_of(modules: dict[str, Any]) -> list[Any]:
    classes = [("mh_moe", "Magi2MultiHeadMoE"), ("modeling_magi2", "Magi2TransformerLayer")]
    return [*modules.values(), *(getattr(modules[module], name) for module, name in classes if module in modules)]


def check_drift(
    edits: Edits,
    refused: set[str],
    reason: str,
    *,
    applied: dict[str, set[tuple[str, str]]] | None = None,
    not_needed: frozenset[str] = frozenset(),
    on_trial: frozenset[str] = frozenset(),
    prepare: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Load the plugin on a changed host and compare everything that was there before.

    Args:
        refused: the records that must be refused, all others applied.
        reason: part of the first one's status.
        applied: other attributes than the usual ones, by record.
        not_needed: records that this host does without.
        on_trial: records that are applied to a function of unknown body.
        prepare: called with the modules before the plugin loads.
    """
    from vllm_musa_headpar import diagnosis, plugin, register

    with tempfile.TemporaryDirectory(prefix="headpar-") as root, modified_magi2(Path(root), sources(edits)) as modules:
        if prepare is not None:
            prepare(modules)
        owners = owners_of(modules)
        before = snapshot(*owners)
        with environment(VLLM_MUSA_HEADPAR="1"), fresh_plugin() as log:
            register()
            register()
            records = {record.name: record for record in plugin.report()}
            found = {name for name, record in records.items() if record.status == "refused"}
            assert found == refused, {name: records[name].reason for name in found}
            spared = {name for name, record in records.items() if record.status == "not needed"}
            assert spared == {"head_parallel.bridge", "magi2.attention_shards", *diagnosis.MUSA_RECORDS, *not_needed}
            tried = {name for name, record in records.items() if record.status == "on trial"}
            assert tried == on_trial
            expected = {**ATTRIBUTES, **(applied or {})}
            touched = [expected[name] for name in ATTRIBUTES if records[name].status in ("applied", "on trial")]
            assert changed(before, *owners) == set().union(*touched)
            check_log(log, {name: records[name].reason for name in refused})
            first = min(refused, default=None)
            assert first is None or reason in records[first].reason, records[first].reason

            found_by_doctor = diagnosis.diagnose()
            assert found_by_doctor.records == [record.as_dict() for record in plugin.report()]
            patches = next(check for check in found_by_doctor.checks if check.name == "patches")
            assert patches.verdict == ("warning" if refused or on_trial else "ok")
            assert all(name in patches.seen for name in refused | on_trial)

            assert plugin.undo() == []
            assert changed(before, *owners) == set()
        with environment(VLLM_MUSA_HEADPAR="strict"), fresh_plugin() as log:
            if refused:
                with pytest.raises(plugin.StrictModeError) as caught:
                    register()
                assert all(f"{name} is not applied" in str(caught.value) for name in refused)
            else:
                register()
            assert [level for level, _ in log] == ["INFO"]
        assert changed(before, *owners) == set()


def check_log(log: list[tuple[str, str]], reasons: dict[str, str]) -> None:
    """One warning per refused record, and the line that the plugin is on."""
    assert [level for level, _ in log].count("INFO") == 1
    warnings = [message for level, message in log if level == "WARNING"]
    assert len(warnings) == len(reasons), warnings
    for name, reason in reasons.items():
        assert [message for message in warnings if name in message and reason in message], (name, warnings)


# File, qualified name, record, further records that depend on it, some statement of it and the same changed
FUNCTIONS = {
    "ep_dispatch": ("parallel.py", {"magi2.ep_dispatch"}, MOE, "send = tensor.contiguous()", "send = tensor.clone()"),
    "ep_undispatch": (
        "parallel.py",
        {"magi2.ep_undispatch"},
        MOE,
        "send = tensor.contiguous()",
        "send = (2 * tensor).contiguous()",
    ),
    "scatter_heads_gather_seqlen": (
        "parallel.py",
        {"magi2.attention_dispatch"},
        set(),
        "tensors = list(tensors)",
        "tensors = [*tensors]",
    ),
    "scatter_seqlen_gather_heads": (
        "parallel.py",
        {"magi2.attention_return"},
        set(),
        "local_tokens = split_sizes[group.rank]",
        "local_tokens = int(split_sizes[group.rank])",
    ),
    "Magi2MultiHeadMoE.forward": (
        "mh_moe.py",
        {"magi2.moe_forward"},
        set(),
        "if self.ep_pad_heads:",
        "if self.ep_pad_heads > 0:",
    ),
}


def body_changed(rank: int, nproc: int, store: str, name: str) -> None:
    file, records, dependent, old, new = FUNCTIONS[name]
    # What only moves data is taken on trial; what goes past it without one is refused.
    on_trial = frozenset() if file == "mh_moe.py" else frozenset(records)
    refused = (records - on_trial) | dependent
    check_drift([(file, name, old, new)], refused, "its body has changed", on_trial=on_trial)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_changed_body_is_on_trial_where_it_moves_data_else_left_alone(ranks: RankPool, name: str) -> None:
    ranks(body_changed, 1, name)


# Function, its record, its old parameters and what becomes of them
GROUP = "    group: Magi2ParallelGroup | None = None,\n"
SIZES = "    sequence_split_sizes: list[int] | None = None,\n"
SPLIT = "    split_sizes: list[int],\n"
PARAMETERS: dict[str, tuple[str, set[str], list[tuple[str, str]]]] = {
    "added": ("ep_dispatch", {"magi2.ep_dispatch"} | MOE, [(SIZES, SIZES + "    replicas: int = 1,\n")]),
    "renamed": ("ep_dispatch", {"magi2.ep_dispatch"} | MOE, [("sequence_split_sizes", "sizes")]),
    "reordered": ("ep_undispatch", {"magi2.ep_undispatch"} | MOE, [(GROUP + SIZES, SIZES + GROUP)]),
    "keyword only": ("ep_undispatch", {"magi2.ep_undispatch"} | MOE, [(GROUP, GROUP + "    *,\n")]),
    "another default": (
        "scatter_seqlen_gather_heads",
        {"magi2.attention_return"},
        [(SPLIT, SPLIT.replace(",\n", " = (),\n"))],
    ),
}


def parameters_changed(rank: int, nproc: int, store: str, kind: str) -> None:
    function, records, replacements = PARAMETERS[kind]
    check_drift([("parallel.py", function, old, new) for old, new in replacements], records, "its signature is")


@pytest.mark.parametrize("kind", PARAMETERS)
def test_changed_parameters_are_left_alone(ranks: RankPool, kind: str) -> None:
    ranks(parameters_changed, 1, kind)


def layer_parameter_added(rank: int, nproc: int, store: str) -> None:
    name = "Magi2TransformerLayer.forward"
    edits = [("modeling_magi2.py", name, "cp_split_sizes: list[int] | torch.Tensor,", "cp_split_sizes, step=0,")]
    check_drift(edits, {"magi2.known_counts"}, "its signature is")


def test_a_layer_with_another_parameter_is_left_alone(ranks: RankPool) -> None:
    ranks(layer_parameter_added, 1)


def sizes_parameter(rank: int, nproc: int, store: str) -> None:
    signature = "def forward(self, x: torch.Tensor)"
    edits = [
        ("mh_moe.py", "Magi2MultiHeadMoE.forward", signature, signature[:-1] + ", sequence_split_sizes=None)"),
    ]
    check_drift(edits, MOE, "its signature is", not_needed=frozenset({"magi2.known_counts"}))


def test_a_layer_that_takes_the_sizes_itself_needs_no_known_counts(ranks: RankPool) -> None:
    ranks(sizes_parameter, 1)


def function_gone(rank: int, nproc: int, store: str) -> None:
    edits = [
        ("parallel.py", "", "def ep_dispatch(", "def dispatch_experts("),
        ("mh_moe.py", "", "import Magi2ParallelGroup, ep_dispatch,", "import Magi2ParallelGroup, dispatch_experts,"),
        ("mh_moe.py", "", "x_heads = ep_dispatch(", "x_heads = dispatch_experts("),
    ]
    check_drift(edits, {"magi2.ep_dispatch"} | MOE, "parallel has no ep_dispatch")


GIVES_OLD_NAME = """
def __getattr__(name):
    if name == "Magi2MultiHeadMoE":
        return Magi2ExpertLayer
    raise AttributeError(name)
"""


def class_gone(rank: int, nproc: int, store: str) -> None:
    edits = [
        ("mh_moe.py", "", "class Magi2MultiHeadMoE(", "class Magi2ExpertLayer("),
        ("mh_moe.py", "", "", GIVES_OLD_NAME),
    ]
    check_drift(edits, MOE, "mh_moe has no Magi2MultiHeadMoE.forward")


def test_what_is_gone_is_said(ranks: RankPool) -> None:
    ranks(function_gone, 1)
    ranks(class_gone, 1)


TURNED = {
    "class": (
        "_stock = ep_dispatch\nclass ep_dispatch:\n    def __new__(cls, *args, **named):\n"
        "        return _stock(*args, **named)\n",
        "it is a type, not a plain function",
    ),
    "partial": ("import functools\nep_dispatch = functools.partial(ep_dispatch)\n", "it is a partial"),
    "builtin": ("import operator\nep_dispatch = operator.index\n", "it is a builtin_function_or_method"),
    "cached": ("import functools\nep_dispatch = functools.cache(ep_dispatch)\n", "it is a _lru_cache_wrapper"),
    "wrapped": (
        "import functools\n_stock = ep_dispatch\n@functools.wraps(_stock)\n"
        "def ep_dispatch(*args, **named):\n    return _stock(*args, **named)\n",
        "it is wrapped by",
    ),
    "closure": (
        "def _make(stock):\n"
        "    def ep_dispatch(tensor, group=None, sequence_split_sizes=None):\n"
        "        return stock(tensor, group, sequence_split_sizes)\n"
        "    return ep_dispatch\nep_dispatch = _make(ep_dispatch)\n",
        "it is a closure",
    ),
    "another module's": ("from textwrap import dedent as ep_dispatch\n", "it comes from"),
    "nothing": ("ep_dispatch = None\n", "it is a NoneType"),
}


def turned(rank: int, nproc: int, store: str, kind: str) -> None:
    text, reason = TURNED[kind]
    check_drift([("parallel.py", "", "", text)], {"magi2.ep_dispatch"} | MOE, reason)


@pytest.mark.parametrize("kind", TURNED)
def test_a_function_turned_into_something_else_is_left_alone(ranks: RankPool, kind: str) -> None:
    ranks(turned, 1, kind)


def cosmetics(source: str, name: str) -> str:
    """Another docstring, comments, blank lines, and brackets wrapped elsewhere; not one other token."""
    function = name.rpartition(".")[2]
    lines = []
    for line in source.splitlines(keepends=True):
        indent = line[: len(line) - len(line.lstrip())]
        if line.count('"""') == 2:
            line = f"{indent}r'''Said in other words.\n\n{indent}And more of them.\n{indent}'''\n"
        elif line.rstrip().endswith("("):
            line = line.rstrip() + "  # opens\n\n"
        elif line.lstrip().startswith(("if ", "output = ", "return ")):
            line = f"{indent}# {function}, as before\n\n{line}"
        lines.append(line)
    return "".join(lines)


def cosmetic(rank: int, nproc: int, store: str) -> None:
    edits: Edits = []
    for name, (file, *_) in FUNCTIONS.items():
        text = function_text(host_source(file), name)
        assert cosmetics(text, name) != text
        edits.append((file, "", text, cosmetics(text, name)))
    check_drift(edits, set(), "")


def test_comments_docstrings_and_layout_are_no_drift(ranks: RankPool) -> None:
    ranks(cosmetic, 1)


def layer_body_changed(rank: int, nproc: int, store: str) -> None:
    # This forward is wrapped, not written anew: only its parameters matter.
    edits = [
        ("modeling_magi2.py", "Magi2TransformerLayer.forward", "self.attention.attend(", "(self.attention.attend)(")
    ]
    check_drift(edits, set(), "")


def test_a_changed_layer_body_is_wrapped_all_the_same(ranks: RankPool) -> None:
    ranks(layer_body_changed, 1)


def another_name(rank: int, nproc: int, store: str) -> None:
    edits = [
        ("attention.py", "", "    scatter_heads_gather_seqlen,", "    scatter_heads_gather_seqlen as to_all_tokens,"),
        ("attention.py", "", "= scatter_heads_gather_seqlen(", "= to_all_tokens("),
    ]
    stock = f"{MAGI2}.parallel", "scatter_heads_gather_seqlen"
    check_drift(
        edits, set(), "", applied={"magi2.attention_dispatch": {stock, (f"{MAGI2}.attention", "to_all_tokens")}}
    )


def another_name_in_moe(rank: int, nproc: int, store: str) -> None:
    edits = [
        (
            "mh_moe.py",
            "",
            "import Magi2ParallelGroup, ep_dispatch,",
            "import Magi2ParallelGroup, ep_dispatch as spread,",
        ),
        ("mh_moe.py", "", "x_heads = ep_dispatch(", "x_heads = spread("),
    ]
    stock = f"{MAGI2}.parallel", "ep_dispatch"
    names = {"magi2.ep_dispatch": {stock, (f"{MAGI2}.mh_moe", "spread")}}
    check_drift(edits, MOE, "its body has changed", applied=names)


def not_used(rank: int, nproc: int, store: str) -> None:
    text = "def scatter_heads_gather_seqlen(tensors, split_sizes, group=None):\n    return list(tensors)\n"
    check_drift([("attention.py", "", "", text)], {"magi2.attention_dispatch"}, "attention does not use")


def test_names_are_followed_to_where_they_are_imported(ranks: RankPool) -> None:
    ranks(another_name, 1)
    ranks(another_name_in_moe, 1)
    ranks(not_used, 1)


def broken_module(rank: int, nproc: int, store: str) -> None:
    broken = "raise RuntimeError('broken host')\n"
    edits = [("modeling_magi2.py", "", "import os\n", f"import os\n{broken}")]
    check_drift(edits, {"magi2.known_counts"}, "modeling_magi2 cannot be imported: RuntimeError: broken host")


def test_a_module_that_cannot_be_imported_costs_its_records_only(ranks: RankPool) -> None:
    ranks(broken_module, 1)


def wrap_with_tools(owner: Any, name: str) -> Any:
    """Another plugin's wrapper."""
    stock = vars(owner)[name]

    @functools.wraps(stock)
    def wrapper(*args: Any, **named: Any) -> Any:
        CALLS.append(name)
        return stock(*args, **named)

    setattr(owner, name, wrapper)
    return wrapper


CALLS: list[str] = []


def wrap_dispatch(modules: dict[str, Any]) -> None:
    modules["mh_moe"].ep_dispatch = wrap_with_tools(modules["parallel"], "ep_dispatch")


def wrap_importer(modules: dict[str, Any]) -> None:
    wrap_with_tools(modules["attention"], "scatter_seqlen_gather_heads")


def wrap_moe(modules: dict[str, Any]) -> None:
    wrap_with_tools(modules["mh_moe"].Magi2MultiHeadMoE, "forward")


def wrap_layer(modules: dict[str, Any]) -> None:
    wrap_with_tools(modules["modeling_magi2"].Magi2TransformerLayer, "forward")


WRAPPED = {
    "a function": (wrap_dispatch, {"magi2.ep_dispatch"} | MOE, "it is wrapped by"),
    "where it is imported": (wrap_importer, {"magi2.attention_return"}, "attention does not use"),
    "the MoE forward": (wrap_moe, MOE, "it is wrapped by"),
    "the layer forward": (wrap_layer, {"magi2.known_counts"}, "it is wrapped by"),
}


def wrapped_before(rank: int, nproc: int, store: str, kind: str) -> None:
    prepare, records, reason = WRAPPED[kind]
    check_drift([], records, reason, prepare=prepare)


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_wrapper_that_was_there_before_stays(ranks: RankPool, kind: str) -> None:
    ranks(wrapped_before, 1, kind)


def wrapped_after(rank: int, nproc: int, store: str) -> None:
    """Another's wrappers over ours: both work, undo refuses these and takes the others back."""
    import torch

    from vllm_musa_headpar import diagnosis, plugin, register

    with tempfile.TemporaryDirectory(prefix="headpar-") as root, modified_magi2(Path(root)) as modules:
        owners = owners_of(modules)
        before = snapshot(*owners)
        with environment(VLLM_MUSA_HEADPAR="1"), fresh_plugin() as log:
            register()
            ours = vars(modules["mh_moe"])["ep_dispatch"]
            theirs = wrap_with_tools(modules["mh_moe"], "ep_dispatch")
            wrap_with_tools(owners[-1], "forward")
            overlaid = {"magi2.ep_dispatch", "magi2.known_counts"}

            register()
            assert {record.name for record in plugin.report() if record.status == "overlaid"} == overlaid
            reason = next(record.reason for record in plugin.report() if record.name == "magi2.ep_dispatch")
            assert "mh_moe.ep_dispatch has been replaced since" in reason
            assert [level for level, _ in log] == ["INFO"]
            found = diagnosis.diagnose()
            assert found.active
            assert found.records == [record.as_dict() for record in plugin.report()]
            assert "magi2.ep_dispatch overlaid" in next(c.seen for c in found.checks if c.name == "patches")

            single = modules["parallel"].Magi2ParallelGroup(None, 1, 0)
            tensor = torch.ones(2, 3, 4)
            CALLS.clear()
            assert modules["mh_moe"].ep_dispatch(tensor, single) is tensor
            assert CALLS == ["ep_dispatch"]

            assert {record.name for record in plugin.undo()} == overlaid
            left = {*ATTRIBUTES["magi2.ep_dispatch"], *ATTRIBUTES["magi2.known_counts"]}
            assert changed(before, *owners) == left
            assert modules["mh_moe"].ep_dispatch is theirs
            assert theirs.__wrapped__ is ours
            assert modules["mh_moe"].ep_dispatch(tensor, single) is tensor
            assert CALLS == ["ep_dispatch"] * 2

            modules["mh_moe"].ep_dispatch = ours  # they take theirs off: then ours can go
            assert {record.name for record in plugin.undo()} == {"magi2.known_counts"}
            assert changed(before, *owners) == ATTRIBUTES["magi2.known_counts"]


def test_a_wrapper_laid_over_ours_works_and_stays(ranks: RankPool) -> None:
    ranks(wrapped_after, 1)


def wrapped_after_and_again(rank: int, nproc: int, store: str) -> None:
    """Taken back under another's wrapper and loaded again: what would go past that wrapper is refused."""
    from vllm_musa_headpar import plugin, register

    with tempfile.TemporaryDirectory(prefix="headpar-") as root, modified_magi2(Path(root)) as modules:
        owners = owners_of(modules)
        stock = snapshot(*owners)
        with environment(VLLM_MUSA_HEADPAR="1"), fresh_plugin() as log:
            register()
            wrap_with_tools(modules["mh_moe"], "ep_dispatch")
            plugin.undo()
            log.clear()
            register()
            records = {record.name: record for record in plugin.report()}
            assert records["magi2.ep_dispatch"].status == "overlaid"
            assert records["magi2.moe_forward"].status == "refused"
            assert "mh_moe.ep_dispatch, which it would go past, is another's" in records["magi2.moe_forward"].reason
            check_log([("INFO", ""), *log], {"magi2.moe_forward": records["magi2.moe_forward"].reason})
            assert ("Magi2MultiHeadMoE", "forward") not in changed(stock, *owners)


def test_nothing_is_applied_past_a_later_wrapper(ranks: RankPool) -> None:
    ranks(wrapped_after_and_again, 1)


def looked_at_anew(rank: int, nproc: int, store: str) -> None:
    """What was refused is not refused for good: the reason is always that of the last look."""
    from vllm_musa_headpar import plugin, register

    def status(name: str = "magi2.ep_dispatch") -> tuple[str, str]:
        (found,) = (record for record in plugin.report() if record.name == name)
        return found.status, found.reason

    with tempfile.TemporaryDirectory(prefix="headpar-") as root, modified_magi2(Path(root)) as modules:
        owners = owners_of(modules)
        stock = snapshot(*owners)
        parallel, original = modules["parallel"], modules["parallel"].ep_dispatch
        with environment(VLLM_MUSA_HEADPAR="1"), fresh_plugin():
            wrap_with_tools(parallel, "ep_dispatch")
            register()
            assert status()[0] == "refused"
            assert "is wrapped by" in status()[1]
            parallel.ep_dispatch = lambda tensor: tensor
            register()
            assert status()[0] == "refused"
            assert "it comes from" in status()[1]
            assert plugin.undo() == []
            assert status() == ("undone", "there was nothing to take back")
            assert {record.status for record in plugin.report()} == {"undone"}
            parallel.ep_dispatch = original
            register()
            assert status() == ("applied", "")
            # And without an undo in between, once the wrapper has gone.
            assert plugin.undo() == []
            wrap_with_tools(parallel, "ep_dispatch")
            register()
            assert status()[0] == "refused"
            parallel.ep_dispatch = original
            register()
            assert {record.status for record in plugin.report()} == {"applied", "not needed"}
            assert plugin.undo() == []
            assert changed(stock, *owners) == set()


def test_a_refused_record_is_looked_at_anew(ranks: RankPool) -> None:
    ranks(looked_at_anew, 1)


def from_two_threads(rank: int, nproc: int, store: str) -> None:
    from vllm_musa_headpar import plugin, register

    with tempfile.TemporaryDirectory(prefix="headpar-") as root, modified_magi2(Path(root)) as modules:
        owners = owners_of(modules)
        before = snapshot(*owners)
        with environment(VLLM_MUSA_HEADPAR="1"), fresh_plugin() as log:
            start, failures = threading.Barrier(2), []

            def load() -> None:
                start.wait()
                try:
                    register()
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=load) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not failures
            assert [level for level, _ in log] == ["INFO"]
            assert changed(before, *owners) == set().union(*ATTRIBUTES.values())
            assert plugin.undo() == []
        assert changed(before, *owners) == set()


def test_two_threads_apply_once(ranks: RankPool) -> None:
    ranks(from_two_threads, 1)


PLAIN = """\
def function(a, b=1):
    value = f"{a!r:>{b}} and {a['x']}" + f'{{literal}}'
    if value:
        return call(a, [b, value])
    return None
"""
SAME = {
    "docstring": PLAIN.replace("=1):\n", '=1):\n    """Says something.\n\n    More.\n    """\n'),
    "raw docstring": PLAIN.replace("=1):\n", "=1):\n    r'Says something.' 'And more.'\n"),
    "comments": PLAIN.replace("if value:", "if value:  # why").replace(
        "    return None", "    # none\n    return None"
    ),
    "blank lines": PLAIN.replace("\n    if", "\n\n\n    if"),
    "wrapped in brackets": PLAIN.replace("(a, [b, value])", "(\n            a,\n\n            [b, value]\n        )"),
    "wrapped by backslash": PLAIN.replace(" + f'", " \\\n        + f'"),
    "indentation": PLAIN.replace("    ", "  "),
    "spaces": PLAIN.replace("b=1", "b = 1").replace("[b, value]", "[ b,value ]"),
    "no last newline": PLAIN.rstrip("\n"),
}
OTHER = {
    "operator": PLAIN.replace("+", "-"),
    "replacement field": PLAIN.replace("{a!r", "{a!s"),
    "nested field": PLAIN.replace(">{b}", "<{b}"),
    "literal of an f-string": PLAIN.replace(" and ", " or "),
    "plain string": PLAIN.replace("f'{{literal}}'", "'{{literal}}'"),
    "default": PLAIN.replace("b=1", "b=2"),
    "statement gone": PLAIN.replace("    return None\n", ""),
    "statement moved into the branch": PLAIN.replace("    return None", "        return None"),
    "string that is used": PLAIN.replace("    return None", "    return 'None'"),
}


def test_the_fingerprint_ignores_what_does_nothing() -> None:
    known = fingerprint(PLAIN)
    assert {name: fingerprint(text) for name, text in SAME.items()} == dict.fromkeys(SAME, known)
    assert all(text != PLAIN for text in SAME.values())


def test_the_fingerprint_tells_what_does_something() -> None:
    prints = {name: fingerprint(text) for name, text in OTHER.items()}
    assert len({*prints.values(), fingerprint(PLAIN)}) == len(prints) + 1


def test_the_fingerprint_is_the_same_in_every_python() -> None:
    # From Python 3.12 on f-strings come as several tokens (PEP 701); this is what Python 3.11 gives.
    assert fingerprint(PLAIN) == "44f4eab8bac6bcbe"
    nested = 'def f(a):\n    return f"{a:{f"{1}"}}"\n'
    with contextlib.suppress(SyntaxError):
        compile(nested, "nested", "exec")
        assert fingerprint(nested) != fingerprint(nested.replace("1", "2"))
