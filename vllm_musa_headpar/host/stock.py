"""Whether a function is the stock object that a patch was written for."""

from __future__ import annotations

import hashlib
import inspect
import io
import os
import tokenize
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any


def why_not_stock(function: Any, module: ModuleType, signature: str, expected: str | None) -> str | None:
    """Why `function` is not the plain function of `module` that is expected; None if it is.

    Args:
        function: what is found where the patch would go.
        module: the module that should have defined it.
        signature: names and defaults as in `signature_of`.
        expected: the fingerprint, as in `fingerprint_of`; None where only the signature matters.
    """
    # inspect looks through wrappers, so type, code and globals are looked at themselves.
    if not isinstance(function, FunctionType):
        return f"it is a {type(function).__name__}, not a plain function"
    if hasattr(function, "__wrapped__"):
        return f"it is wrapped by {function.__code__.co_filename}:{function.__code__.co_firstlineno}"
    if function.__globals__ is not vars(module) or not _same_file(function.__code__.co_filename, module):
        return f"it comes from {function.__code__.co_filename}, not from {module.__name__}"
    if function.__closure__:
        return "it is a closure"
    found = signature_of(function)
    if found != signature:
        return f"its signature is {found}, expected {signature}"
    if expected is not None:
        try:
            found = fingerprint_of(function)
        except (OSError, SyntaxError, tokenize.TokenError) as error:
            return f"its source cannot be read: {error}"
        if found != expected:
            return f"its body has changed: fingerprint {found}, expected {expected}"
    return None


def signature_of(function: FunctionType) -> str:
    """Parameter names, kinds and defaults, without annotations."""
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return str(inspect.Signature(bare))


def fingerprint_of(function: FunctionType) -> str:
    """16 hex digits over the source's token stream, without comments, docstrings and layout.

    The same in every Python version: f-strings, which newer tokenizers take apart, count as one string.
    """
    lines, _ = inspect.getsourcelines(function.__code__)
    return fingerprint("".join(lines))


def fingerprint(source: str) -> str:
    """The fingerprint of a function's source text."""
    digest = hashlib.sha256()
    for statement in _statements(source):
        if not all(kind == tokenize.STRING for kind, _ in statement):  # a docstring does nothing
            for kind, text in statement:
                digest.update(f"{tokenize.tok_name[kind]} {text}\n".encode())
            digest.update(b";\n")
    return digest.hexdigest()[:16]


def _statements(source: str) -> Iterable[list[tuple[int, str]]]:
    """Logical lines as (kind, text); an indent or dedent is a line of its own."""
    statement: list[tuple[int, str]] = []
    for kind, text in _tokens(source):
        if kind in (tokenize.INDENT, tokenize.DEDENT):
            yield [(kind, "")]
        elif kind == tokenize.NEWLINE:
            yield statement
            statement = []
        else:
            statement.append((kind, text))
    if statement:
        yield statement


_LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)
_STRING_STARTS = {getattr(tokenize, name, None) for name in ("FSTRING_START", "TSTRING_START")}
_STRING_ENDS = {getattr(tokenize, name, None) for name in ("FSTRING_END", "TSTRING_END")}


def _tokens(source: str) -> Iterable[tuple[int, str]]:
    lines = source.splitlines(keepends=True)
    depth, start = 0, (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _STRING_STARTS:
            start = token.start if depth == 0 else start
            depth += 1
        elif token.type in _STRING_ENDS:
            depth -= 1
            if depth == 0:
                yield tokenize.STRING, _slice(lines, start, token.end)
        elif depth == 0 and token.type not in _LAYOUT:
            yield token.type, token.string


def _slice(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    (first, begin), (last, stop) = start, end
    if first == last:
        return lines[first - 1][begin:stop]
    return "".join([lines[first - 1][begin:], *lines[first : last - 1], lines[last - 1][:stop]])


def _same_file(filename: str, module: ModuleType) -> bool:
    path = getattr(module, "__file__", None)
    return path is not None and os.path.realpath(filename) == os.path.realpath(path)
