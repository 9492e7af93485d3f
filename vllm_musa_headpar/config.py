"""The environment variables, read in this one place into one frozen settings object."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

FLAG = "VLLM_MUSA_HEADPAR"
EXCHANGE = "VLLM_MUSA_HEADPAR_EXCHANGE"
CHECK = "VLLM_MUSA_HEADPAR_CHECK"
PROFILE = "VLLM_MUSA_HEADPAR_PROFILE"
VARIABLES = (FLAG, EXCHANGE, CHECK, PROFILE)

AUTO = "auto"
_OFF = ("", "0", "false", "off", "no")
_ON = ("1", "true", "on", "yes")
_STRICT = "strict"


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    Attributes:
        enabled: whether the plugin is switched on.
        strict: what does not fit is an error at start.
        exchange: an implementation's name as it was written, or "auto". Resolved at the first exchange of a group,
            where capitals do not matter.
        check: compare the ranks' exchanges before each one.
        profile: path of a profile that "auto" follows, or None.
        problems: sentences on values that are not allowed; each stands for its default then.
    """

    enabled: bool = False
    strict: bool = False
    exchange: str = AUTO
    check: bool = False
    profile: str | None = None
    problems: tuple[str, ...] = ()


def read(environ: Mapping[str, str] | None = None) -> Settings:
    """The settings of an environment, by default this process's."""
    environ = os.environ if environ is None else environ
    flag, check = environ.get(FLAG, ""), environ.get(CHECK, "")
    problems = []
    if _plain(flag) not in (*_OFF, *_ON, _STRICT):
        allowed = "unset, 0, false, off or no for off; 1, true, on or yes for on; or strict"
        problems.append(f"{FLAG}={flag!r} is not allowed and counts as off: expected {allowed}")
    if _plain(check) not in (*_OFF, *_ON):
        problems.append(f"{CHECK}={check!r} is not allowed and counts as off: expected 1 or 0")
    exchange = environ.get(EXCHANGE, "").strip()
    return Settings(
        enabled=_plain(flag) in (*_ON, _STRICT),
        strict=_plain(flag) == _STRICT,
        exchange=AUTO if _plain(exchange) in ("", AUTO) else exchange,
        check=_plain(check) in _ON,
        profile=environ.get(PROFILE, "").strip() or None,
        problems=tuple(problems),
    )


def _plain(value: str) -> str:
    return value.strip().lower()


def announce_to_vllm() -> None:
    """Make the variables known to vLLM's environment check, where `vllm.envs` is imported already.

    vLLM warns of `VLLM_*` variables that it does not know and, on request, refuses to start. This holds for
    an explicit "off" too. The getters must not raise: vLLM calls them all to fill its cache.
    """
    envs = sys.modules.get("vllm.envs")
    known = getattr(envs, "environment_variables", None)
    if isinstance(known, dict):
        for name in VARIABLES:
            known.setdefault(name, partial(os.environ.get, name))
