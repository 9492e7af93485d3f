"""Which families of the installed host's diffusion models exchange heads, and which records serve them.

Found in the host's sources, which are read, not imported: its models take seconds. A family is a folder of
`vllm_omni.diffusion.models`. It exchanges heads where its code, or the attention layer that it shards its sequence
for, reaches something that a record replaces.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from .ledger import HOST

MODELS = f"{HOST}.diffusion.models"
ATTENTION_LAYER = f"{HOST}.diffusion.attention.layer"
ULYSSES = f"{HOST}.diffusion.attention.parallel.ulysses"  # what that layer exchanges heads with
PLAN = "_sp_plan"  # how a model says where its sequence is sharded
BY_HAND = "get_sp_group"  # how one asks that shards it itself

Name = tuple[str, str]  # a module, and a function or class in it


def served(replaced: Mapping[str, str]) -> dict[str, list[str]]:
    """The families that exchange heads, each with the records that it comes to.

    Args:
        replaced: by record, what it replaces: `module:name, name`.

    Returns:
        By family, names of records in their order. Empty where there is no host, or its sources cannot be had.
    """
    targets = {record: set(_names(text)) for record, text in replaced.items()}
    replaceable = {name for names in targets.values() for name in names}
    modules = {module for module, _ in replaceable}
    by_attention = _reached(_facts(_source(ULYSSES)), modules) | {name for name in replaceable if name[0] == ULYSSES}
    families = {}
    for folder in _folders():
        reached = set()
        for text in _texts(folder, modules):
            facts = _facts(text)
            reached |= _reached(facts, modules)
            reached |= by_attention if facts.shards else set()
        package = f"{MODELS}.{folder.name}."
        found = [
            record
            for record, names in targets.items()
            if names & reached or any(module.startswith(package) for module, _ in names)
        ]
        if found:
            families[folder.name] = found
    return families


def _names(text: str) -> Iterator[Name]:
    """`module:Class.method, function` -> (module, "Class"), (module, "function")."""
    module, _, names = text.partition(":")
    for name in filter(None, names.split(", ")):
        yield module, name.partition(".")[0]


def _folders() -> list[Path]:
    try:
        spec = find_spec(MODELS)
    except (ImportError, ValueError):
        return []
    roots = (spec and spec.submodule_search_locations) or []
    return sorted(path for root in roots for path in Path(root).iterdir() if path.is_dir() and path.name[0] not in "_.")


def _texts(folder: Path, modules: Iterable[str]) -> Iterator[str]:
    """The files of a family that may have to do with exchanges."""
    for file in sorted(folder.rglob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace")
        if any(word in text for word in (PLAN, BY_HAND, *modules)):
            yield text


def _source(module: str) -> str:
    """A module's source; empty where it cannot be had."""
    try:
        spec = find_spec(module)
        return Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
    except (ImportError, ValueError, OSError):
        return ""


@dataclass(frozen=True)
class _Facts:
    """Of one file: what it imports by name, and whether a model of it shards its sequence."""

    imports: frozenset[Name]
    shards: bool


@cache
def _facts(text: str) -> _Facts:
    nodes = list(ast.walk(_parsed(text)))
    imports = frozenset(
        (node.module, alias.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    )
    return _Facts(imports, _has_plan(nodes) or _shards_by_hand(nodes, imports))


@cache
def _uses(text: str) -> dict[str, set[str]]:
    """By each definition of a module, the others of that module that it names."""
    own = {part.name: part for part in _parsed(text).body if isinstance(part, (ast.FunctionDef, ast.ClassDef))}
    return {
        name: {node.id for node in ast.walk(part) if isinstance(node, ast.Name) and node.id in own}
        for name, part in own.items()
    }


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError:  # for a newer Python, or no code
        return ast.parse("")


def _reached(facts: _Facts, modules: set[str]) -> set[Name]:
    """What is imported from the modules, and what that uses of its own module."""
    found: set[Name] = set()
    waiting = [name for name in facts.imports if name[0] in modules]
    while waiting:
        module, name = waiting.pop()
        if (module, name) not in found:
            found.add((module, name))
            waiting += [(module, used) for used in _uses(_source(module)).get(name, ())]
    return found


def _has_plan(nodes: Iterable[ast.AST]) -> bool:
    for node in nodes:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                named = target.id if isinstance(target, ast.Name) else getattr(target, "attr", None)
                if named == PLAN and not _is_empty(node.value):
                    return True
    return False


def _is_empty(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Dict):
        return not value.keys
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def _shards_by_hand(nodes: Iterable[ast.AST], imports: frozenset[Name]) -> bool:
    """Whether a model shards its sequence itself, and lets an attention layer exchange."""
    if BY_HAND not in {name for _, name in imports}:
        return False
    layers = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == ATTENTION_LAYER
        for alias in node.names
        if alias.name == "Attention"
    }
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return any(call.func.id in layers and not _skips(call) for call in calls)  # type: ignore[attr-defined]


def _skips(call: ast.Call) -> bool:
    """`Attention(..., skip_sequence_parallel=True)`"""
    return any(
        keyword.arg == "skip_sequence_parallel" and isinstance(keyword.value, ast.Constant) and keyword.value.value
        for keyword in call.keywords
    )
