"""``tracedraft bench-gpu``: how near decoding comes to what the card's memory bandwidth allows, and what an update of
the draft costs; random weights in the shape of Llama-3.1-8B and its EAGLE-3 draft, so that nothing is downloaded.

Small batches read every weight once a pass and compute little, so bytes over bandwidth is the least time of a pass.
Without a CUDA device a small shape runs the same code as a dry run, whose numbers say nothing of a GPU.

This has never run on a GPU: it was written and dry-run where there was none.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from tracedraft.adapters import objective
from tracedraft.adapters.fixed import FixedSpec
from tracedraft.benchmark.command import each, modes
from tracedraft.benchmark.numbers import PLAIN
from tracedraft.benchmark.pair import PairSpec, prompt
from tracedraft.config import build_spec, check_settings, plain
from tracedraft.decode import DecodeSpec, respond, respond_plainly
from tracedraft.drafts.eagle3 import Eagle3Draft
from tracedraft.drafts.static import StaticRolls
from tracedraft.files import write_atomically
from tracedraft.interfaces import InnerAdapterSpec
from tracedraft.measure import ALL_THREADS
from tracedraft.meter import Meter
from tracedraft.models.graphs import StaticPasses
from tracedraft.provenance import provenance
from tracedraft.report import MISSING, markdown, number
from tracedraft.target import LlamaTarget
from tracedraft.types import Response

RESULT = "bench_gpu.json"
EAGER = "eager"  # plain decoding in passes that are launched operator by operator
EAGER_DRAFT = "eager_draft"  # the first mode, its draft launched operator by operator
ROUND = ("propose", "verify", "observe")
RESPONSE = 1024  # tokens, of whose time an update may take a share
COPIES = 20  # and as many gradients
POSITIONS = 64  # of a gradient: a learner's window


@dataclass(frozen=True)
class Bench:
    """A pair, and the prompt [L] that all answer."""

    spec: PairSpec
    target: LlamaTarget
    draft: Eagle3Draft
    prompt: list[int]
    meter: Meter


def benchmark_gpu(cfg: DictConfig, folder: Path) -> tuple[dict[str, Any], Path]:
    """Measure, and keep the numbers in ``out``, or in a file in ``folder``.

    Raises:
        UserError: bad input; nothing is written.
    """
    check_settings(cfg)
    dry = not torch.cuda.is_available()
    device = torch.device("cpu" if dry else "cuda")
    if dry:
        print("no CUDA device here: a dry run of a small shape, whose numbers say nothing of a GPU", file=sys.stderr)
    cfg = copy.deepcopy(cfg)
    size = cfg.dry_size if dry else cfg.size
    cfg.target.device, cfg.decode.max_new_tokens = device.type, size.max_new_tokens
    spec = build_spec(cfg.dry_pair, "dry_pair") if dry else build_spec(cfg.pair, "pair")
    decodes, learners = modes(cfg), each(cfg, "updates")
    torch.set_num_threads(cfg.threads or ALL_THREADS)
    target = spec.target(device)
    if dry:
        target.static = StaticPasses(target.model, target.taps, captured=False)  # what graphs are captured of
    draft = spec.draft(target)
    if dry:
        draft.static = StaticRolls(draft.allocate, captured=False)
    bench = Bench(spec, target, draft, prompt(spec, size.prompt), Meter(device))
    speed = {"peak": peak(device), "copied": copied(device, size.copy_mib * 2**20)}
    bandwidth = speed["peak"] or speed["copied"]
    done = measured(bench, decodes, learners, cfg.repetitions)
    result = {
        "dry_run": dry,
        "shape": plain(spec),
        "size": dict(size),
        "bandwidth": speed,
        "limit": "peak" if speed["peak"] else "copied",
        "rows": rows(bench, decodes, done, bandwidth, cfg.tau) + gradient_rows(bench, bandwidth),
        "tau": cfg.tau,
        "aims": dict(cfg.aims),
        "repetitions": [{arm: numbers(response) for arm, response in made.items()} for made in done],
        "specs": plain({"decodes": decodes, "updates": learners}),
        "provenance": provenance(),
    }
    file = Path(cfg.out) if cfg.out else folder / RESULT
    content = json.dumps(result, indent=1) + "\n"
    write_atomically(file, lambda path: path.write_text(content), "choose another out=FILE")
    return result, file


def copied(device: torch.device, size: int) -> float:
    """Bytes a second of the fastest of some copies: each byte is read and written."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    sink, best = torch.empty_like(source), float("inf")
    meter = Meter(device)
    for _ in range(COPIES):
        meter.start()
        sink.copy_(source)
        best = min(best, sum(meter.stop().values()))
    return 2 * size / best


def peak(device: torch.device) -> float | None:
    """Bytes a second that the card's memory is clocked for; None where that can't be known."""
    if device.type != "cuda":
        return None
    card = torch.cuda.get_device_properties(device)
    clock, width = getattr(card, "memory_clock_rate", 0), getattr(card, "memory_bus_width", 0)  # kHz, bits
    return 2e3 * clock * width / 8 or None  # two transfers a cycle


def measured(
    bench: Bench, decodes: dict[str, DecodeSpec], learners: dict[str, Any], repetitions: int
) -> list[dict[str, Response]]:
    """By repetition, after one that warms up, the answer of each arm: without a draft, the same in passes that are no
    graphs, in each mode, in the first one with a draft that is none, and with each learner in the first mode."""
    first = next(iter(decodes.values()))
    fixed = FixedSpec("fixed")
    arms = {mode: (decode, fixed) for mode, decode in decodes.items()}
    arms |= {name: (first, adapter) for name, adapter in learners.items()}
    done = []
    for _ in range(repetitions + 1):
        answers = {PLAIN: respond_plainly(bench.target, bench.prompt, first, 0, bench.meter)}
        graphs, bench.target.static = bench.target.static, None
        answers[EAGER] = respond_plainly(bench.target, bench.prompt, first, 0, bench.meter)
        bench.target.static = graphs
        rolls, bench.draft.static = bench.draft.static, None
        answers[EAGER_DRAFT] = _answer(bench, first, fixed)
        bench.draft.static = rolls
        answers |= {name: _answer(bench, decode, adapter) for name, (decode, adapter) in arms.items()}
        done.append(answers)
    return done[1:]


def _answer(bench: Bench, decode: DecodeSpec, adapter: InnerAdapterSpec) -> Response:
    learner = adapter.build(bench.draft.head, 0)
    learner.begin_conversation()
    made = respond(bench.target, bench.draft, learner, bench.prompt, decode, 0, bench.meter)
    learner.begin_conversation()  # and forgets, for the next
    return made


def numbers(response: Response) -> dict[str, Any]:
    committed = sum(update.committed for update in response.updates)
    updates = {"attempted": len(response.updates), "committed": committed}
    return {
        "tokens": len(response.tokens),
        "rounds": response.rounds,
        "updates": updates,
        "seconds": response.seconds,
    }


def rows(
    bench: Bench, decodes: dict[str, DecodeSpec], done: list[dict[str, Response]], bandwidth: float, tau: float
) -> list[dict[str, Any]]:
    """Milliseconds measured beside the least that the bandwidth allows, and of updates beside a response's."""
    length = len(bench.prompt) + len(done[0][PLAIN].tokens) // 2

    def median(arm: str, *phases: str) -> float:
        """Milliseconds a round."""
        return statistics.median(1e3 * sum(made[arm].seconds[p] for p in phases) / made[arm].rounds for made in done)

    def row(what: str, kind: str, ms: float, limit: float) -> dict[str, Any]:
        return {"what": what, "kind": kind, "ms": ms, "limit_ms": limit, "ratio": limit / ms}

    a_pass = 1e3 * bench.spec.pass_bytes(length) / bandwidth
    table = [row("plain decoding, a token", PLAIN, median(PLAIN, "verify"), a_pass)]
    table.append(row("the same without graphs", EAGER, median(EAGER, "verify"), a_pass))
    first = next(iter(decodes))
    for mode, decode in decodes.items():
        drafting = 1e3 * bench.spec.draft_bytes(decode.depth, length) / bandwidth
        table.append(row(f"{mode}, verification", "verify", median(mode, "verify"), a_pass))
        table.append(row(f"{mode}, drafting", "propose", median(mode, "propose"), drafting))
        if mode == first:
            table.append(
                row(f"{mode}, drafting without graphs", EAGER_DRAFT, median(EAGER_DRAFT, "propose"), drafting)
            )
        table.append(row(f"{mode}, a round", "round", median(mode, *ROUND), a_pass + drafting))
    decoding = median(first, *ROUND) * RESPONSE / tau
    for name in [arm for arm in done[0] if arm not in (PLAIN, EAGER, EAGER_DRAFT, *decodes)]:
        spent = [1e3 * made[name].seconds["update"] / len(made[name].updates) for made in done if made[name].updates]
        ms = statistics.median(spent) if spent else None
        share = ms and ms / decoding
        what = f"{name}, an update of {RESPONSE} tokens"
        table.append({"what": what, "kind": "update", "ms": ms, "limit_ms": decoding, "ratio": share})
    return table


def gradient_rows(bench: Bench, bandwidth: float) -> list[dict[str, Any]]:
    """What an update's gradient begins with, in kernels and operator by operator, beside the least time in which the
    head is read."""
    head, meter = bench.draft.head, bench.meter
    positions = objective.Rows.blank(POSITIONS, head)

    def milliseconds(norm: objective.Norm, parts: objective.KlParts) -> float:
        meter.start()
        _, normed = norm(positions.features, head.norm, head.eps)
        logits = head.project(normed.to(head.weight.dtype))
        parts(logits, positions.teacher, 1.0, objective.residual_dtype(head))
        return 1e3 * sum(meter.stop().values())

    ways: dict[str, tuple[objective.Norm, objective.KlParts]] = {
        "operators": (objective.rms_norm, objective.kl_parts)
    }
    chosen = objective.operators(bench.target.device)
    if chosen != ways["operators"]:
        ways["kernels"] = chosen
    with torch.no_grad():
        done = [{way: milliseconds(*functions) for way, functions in ways.items()} for _ in range(COPIES + 1)][1:]
    missing = "there is no GPU" if bench.target.device.type == "cpu" else "its kernels can't be compiled here"
    limit, table = 1e3 * head.weight.nbytes / bandwidth, []
    for way, what in (("kernels", f"norm, head and KL of {POSITIONS} positions"), ("operators", "the same unfused")):
        ms = statistics.median(made[way] for made in done) if way in ways else None
        measured = {"ms": ms, "limit_ms": limit, "ratio": ms and limit / ms}
        table.append({"what": what, "kind": way, **measured, "reason": None if way in ways else missing})
    return table


def text(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    origin, aims = result["provenance"], result["aims"]
    machine, speed = origin["hardware"], result["bandwidth"]
    clocked = "unknown" if speed["peak"] is None else f"{speed['peak'] / 1e9:.0f} GB/s"
    lines = [["", "ms", "limit, ms", "ratio", "aim", "reached"]]
    for row in result["rows"]:
        aim, lower = {PLAIN: (aims["plain"], False), "update": (aims["update"], True)}.get(row["kind"], (None, False))
        reached = MISSING
        if aim is not None and row["ratio"] is not None and not result["dry_run"]:
            reached = "yes" if (row["ratio"] <= aim if lower else row["ratio"] >= aim) else "no"
        ratio = None if row["ratio"] is None else 100 * row["ratio"]
        bound = None if aim is None else 100 * aim
        sign = "≤ " if lower else "≥ "
        cells = [number(row["ms"], 2), number(row["limit_ms"], 2), number(ratio, 1, " %")]
        lines.append([row["what"], *cells, MISSING if bound is None else f"{sign}{bound:g} %", reached])
    head = "DRY RUN of a small shape: these numbers say nothing of a GPU\n" if result["dry_run"] else ""
    missing = [f"- {row['what']}: not measured, {row['reason']}\n" for row in result["rows"] if row.get("reason")]
    allowed = "what is clocked" if result["limit"] == "peak" else "what was copied"
    return (
        f"{head}{', '.join(machine['gpus']) or machine['cpu']}; torch {origin['versions']['torch']}; "
        f"{result['shape']['name']}, random, {result['shape']['dtype']}\n"
        f"memory clocked for {clocked}, copies at {speed['copied'] / 1e9:.0f} GB/s; limits are of {allowed}; "
        f"medians of {len(result['repetitions'])} repetitions\n\n{markdown(lines, ('', 'reached'))}\n"
        f"- an update is a share of the time of {RESPONSE} tokens in the first mode, were {result['tau']:g} of them "
        f"said a round: random weights accept next to none\n{''.join(missing)}"
    )
