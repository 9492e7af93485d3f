"""`bench`: time the exchange against the stock host and the bare collective, and count what it does."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from typing import Any

from .arguments import require_writable, seconds, whole_number, whole_numbers

# MAGI-2: 29,616 tokens on 8 ranks, 12 MoE heads of 256.
TOKENS, HEADS, DIM = 3702, 12, 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    shape = parser.add_argument_group("shape (MAGI-2's by default)")
    shape.add_argument(
        "--nproc",
        type=whole_number(1),
        default=2,
        help="ranks to spawn (2); under torchrun its ranks, with --counts as many as counts",
    )
    shape.add_argument("--tokens", type=whole_number(0), default=TOKENS, help=f"tokens per rank ({TOKENS})")
    shape.add_argument("--counts", type=whole_numbers(0), help="tokens of each rank instead, uneven ones too: 5,0,3")
    shape.add_argument(
        "--heads",
        type=whole_number(1),
        help="heads of all ranks together; by default 12, with --ulysses 24, or the next multiple of the ranks",
    )
    shape.add_argument("--dim", type=whole_number(1), help=f"elements per head ({DIM}, with --ulysses 128)")
    shape.add_argument("--batch", type=whole_number(1), help="elements of the batch, with --ulysses (1)")
    shape.add_argument(
        "--replicas",
        type=whole_number(1),
        help="with --layer: the ranks have all experts so many times, each over a part of the ranks (1)",
    )
    shape.add_argument("--dtype", default="bfloat16", help="a torch element type (bfloat16)")
    how = parser.add_argument_group("measuring")
    how.add_argument(
        "--rounds", type=whole_number(1), help="rounds that are counted (30; with --layer 10, with --ulysses 20)"
    )
    how.add_argument("--backend", choices=("auto", "gloo", "mccl"), default="auto")
    how.add_argument(
        "--exchange", action="append", default=[], metavar="NAME", help="an implementation, repeatable; all by default"
    )
    how.add_argument("--timeout", type=seconds, default=600.0, help="seconds for the whole run (600)")
    how.add_argument(
        "--layer",
        action="store_true",
        help="one MAGI-2 MoE layer and one attention exchange of the installed vLLM-Omni, stock and plugin",
    )
    how.add_argument(
        "--ulysses",
        action="store_true",
        help="the exchanges of one attention of the installed vLLM-Omni's other models, stock and plugin",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="write all numbers there")
    output.add_argument("--plot", metavar="FILE.png", help="measure smaller token counts too and draw the times")


def run(arguments: argparse.Namespace) -> int:
    """Measure and show; 0, or 2 where the bench cannot run as asked, or 1 where a rank failed."""
    from ..bench.world import BenchError, require
    from ..testing.ranks import RankFailure

    try:
        require("rich", "cli")
        if arguments.plot:
            require("matplotlib", "plot")
        _require_targets(arguments)
        if arguments.layer and arguments.ulysses:
            raise ValueError("--layer and --ulysses are two benches: give one of them")
        if arguments.batch and not arguments.ulysses:
            raise ValueError("--batch goes with --ulysses only: MAGI-2's exchanges have no batch")
        if arguments.replicas and not arguments.layer:
            raise ValueError("--replicas goes with --layer only: it is about MAGI-2's experts")
        if arguments.layer:
            _layer(arguments)
        elif arguments.ulysses:
            _ulysses(arguments)
        else:
            _exchange(arguments)
    except (BenchError, ValueError, OSError) as error:
        print(f"vllm-musa-headpar bench: {error}", file=sys.stderr)
        return 2
    except RankFailure as failure:
        print(f"vllm-musa-headpar bench: {failure}", file=sys.stderr)
        return 1
    return 0


def _require_targets(arguments: argparse.Namespace) -> None:
    """What is measured can also be written; of several ranks, rank 0 writes."""
    from ..bench.show import require_picture

    if os.environ.get("RANK", "0") != "0":
        return
    for option, file in (("--json", arguments.json), ("--plot", arguments.plot)):
        if file:
            require_writable(option, file)
    if arguments.plot:
        require_picture(arguments.plot)


def _exchange(arguments: argparse.Namespace) -> None:
    from ..bench import exchange, show, world

    cases = _cases(arguments)
    size = len(cases[0].counts)
    rounds = arguments.rounds or 30
    exchanges = _known(arguments.exchange)
    cases[0].element_type()
    report: Any = world.launch(exchange.run, size, arguments.backend, arguments.timeout, cases, rounds, exchanges)
    if report is None:  # not rank 0 of a torchrun world
        return
    show.print_report(report)
    if arguments.json:
        show.write_json(arguments.json, show.as_json(report))
    if arguments.plot:
        show.plot(arguments.plot, report)


def _refuse(mode: str, **options: Any) -> None:
    """Options that a bench has no use for are no help there."""
    for name, given in options.items():
        if given:
            raise ValueError(f"--{name} does not go with {mode}")


def _ulysses(arguments: argparse.Namespace) -> None:
    from ..bench import layer, show, ulysses
    from ..bench.world import ranks_here

    _refuse("--ulysses", counts=arguments.counts, plot=arguments.plot)
    exchanges, ranks = _known(arguments.exchange), ranks_here(arguments.nproc)
    heads = arguments.heads or -(-ulysses.HEADS // ranks) * ranks
    shape = (arguments.batch or 1, arguments.tokens, heads, arguments.dim or ulysses.DIM)
    rows = ulysses.measure(
        arguments.nproc,
        *shape,
        arguments.rounds or 20,
        exchanges=exchanges or layer.EXCHANGES,
        backend=arguments.backend,
        timeout=arguments.timeout,
    )
    if rows is None:
        return
    ulysses.print_table(rows, shape, ranks)
    if arguments.json:
        show.write_json(arguments.json, [asdict(row) for row in rows])
    print("PASS the same bits with the plugin off and on")  # else measuring has raised


def _layer(arguments: argparse.Namespace) -> None:
    from ..bench import layer, show

    _refuse("--layer", counts=arguments.counts, plot=arguments.plot)
    exchanges = _known(arguments.exchange)
    rows = layer.measure(
        arguments.nproc,
        arguments.tokens,
        arguments.rounds or 10,
        exchanges=exchanges or layer.EXCHANGES,
        heads=arguments.heads or HEADS,
        replicas=arguments.replicas or 1,
        backend=arguments.backend,
        timeout=arguments.timeout,
    )
    if rows is None:
        return
    layer.print_table(rows)
    if arguments.json:
        show.write_json(arguments.json, layer.as_json(rows))
    print("PASS the same bits with the plugin off and on")  # else measuring has raised


def _cases(arguments: argparse.Namespace) -> tuple[Any, ...]:
    """The shapes to measure, smallest first: one, or for a plot several."""
    from ..bench.exchange import Case
    from ..bench.rounds import ticks
    from ..bench.world import ranks_here

    size = ranks_here(len(arguments.counts) if arguments.counts else arguments.nproc)
    every = [(count,) * size for count in (ticks(arguments.tokens) if arguments.plot else [arguments.tokens])]
    if arguments.counts:
        if arguments.plot:
            raise ValueError("--plot draws times over the tokens per rank: give --tokens, not --counts")
        if len(arguments.counts) != size:
            raise ValueError(f"--counts has {len(arguments.counts)} ranks' tokens, but there are {size} ranks")
        every = [arguments.counts]
    if not sum(every[0]):
        raise ValueError("there is nothing to exchange: all token counts are 0")
    heads = arguments.heads or -(-HEADS // size) * size
    if heads % size:
        raise ValueError(f"--heads {heads} must be divisible by the {size} ranks: the stock formula needs that")
    return tuple(Case(counts, heads, arguments.dim or DIM, arguments.dtype) for counts in every)


def _known(exchanges: list[str]) -> tuple[str, ...]:
    """The names as they were registered; capitals do not matter."""
    from .. import registry

    found = []
    for name in exchanges:
        registration = registry.find(name)
        if registration is None:
            raise ValueError(f"--exchange {name!r} is not known: expected one of {', '.join(registry.registered())}")
        found.append(registration.name)
    return tuple(dict.fromkeys(found))
