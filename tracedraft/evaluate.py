"""``tracedraft eval-draft``: how good a draft is before anything learns, and what one of its steps costs."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tracedraft import chat
from tracedraft.adapters.fixed import FixedSpec
from tracedraft.auto import AutoSpec
from tracedraft.calibrate import planned
from tracedraft.config import build_spec, check_settings, fingerprint, plain
from tracedraft.decode import DecodeSpec, respond
from tracedraft.files import write_atomically
from tracedraft.interfaces import Draft
from tracedraft.measure import ALL_THREADS, Bench, check_cache, loaded, serve, warm_up
from tracedraft.meter import Meter
from tracedraft.prefix import Prefix
from tracedraft.provenance import provenance
from tracedraft.report import number, show
from tracedraft.summary import summarise_arm
from tracedraft.types import Conversation, Response

GROUPS = ("target", "draft", "workload", "decode")
RESULT = "eval-draft.json"
REPEATS = 30  # timings of a draft step, of which the median counts


def evaluate_draft(cfg: DictConfig, folder: Path) -> dict[str, Any]:
    """Answer every conversation at every temperature with the unchanged draft; print and keep the result.

    Raises:
        UserError: bad input, before any model is loaded.
    """
    check_settings(cfg)
    specs = {group: build_spec(cfg[group], group) for group in GROUPS}
    temperatures = [float(t) for t in cfg.temperatures]
    decodes = [dataclasses.replace(specs["decode"], temperature=t) for t in temperatures]
    conversations, data = specs["workload"].load()
    specs["draft"].check(specs["target"].shape())
    torch.set_num_threads(cfg.threads or ALL_THREADS)
    served = loaded(specs["target"])
    draft, origin = specs["draft"].build(served.target)
    meter = Meter(served.target.device)
    decodes = [
        planned(decode, served, draft, origin["sha256"], meter) if isinstance(decode, AutoSpec) else decode
        for decode in decodes
    ]
    benches = [Bench(served, decode, cfg.seed, meter) for decode in decodes]
    check_cache(benches[0], [draft], conversations)
    warm_up(benches[0], [draft], conversations)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(specs["workload"].name, total=len(benches) * len(conversations))
        rows = []
        for bench in benches:
            answers, refused = [], 0
            for conversation in conversations:
                answered, cut = answer(bench, draft, conversation)
                answers += answered
                refused += cut
                bar.advance(task)
            rows.append({**summary(bench.decode, draft, answers), "refused": refused})
        why = None if any(row["responses"] for row in rows) else "every prompt is too long for target.context"
        why = "a draft of one step has no further one" if specs["decode"].depth == 1 else why
        cost = None if why else step_cost(draft, specs["decode"].depth, meter)
    contents = {"target": served.provenance["sha256"], "draft": origin["sha256"], "workload": data["sha256"]}
    result = {
        **{group: specs[group].name for group in GROUPS},
        "conversations": len(conversations),
        "rows": rows,
        "draft_step_ms": cost,
        "null_reasons": {"draft_step_ms": why} if why else {},
        "specs": plain(specs),
        "provenance": {
            **provenance(),
            "fingerprint": fingerprint({**specs, "temperatures": temperatures, "seed": cfg.seed}, contents),
            "data": data,
            "draft_weights": origin,
        },
    }
    text = json.dumps(result, indent=1) + "\n"
    write_atomically(folder / RESULT, lambda path: path.write_text(text), "choose another hydra.run.dir")
    show(table(result, specs["decode"].depth))
    return result


def answer(bench: Bench, draft: Draft, conversation: Conversation) -> tuple[list[Response], bool]:
    """Every turn up to one that is too long for the target's context, and whether there was one."""
    fixed, answers = FixedSpec("fixed").build(None, 0), []
    prefix = Prefix() if len(conversation.turns) > 1 else None

    def reply(turn: int, prompt: list[int], key: int) -> str:
        answers.append(respond(bench.served.target, draft, fixed, prompt, bench.decode, key, bench.meter, prefix))
        return chat.decode(bench.served.tokenizer, answers[-1].tokens)

    cut = serve(bench, conversation, reply) is not None
    return answers, cut


def summary(decode: DecodeSpec, draft: Draft, answers: list[Response]) -> dict[str, Any]:
    """Ratios of summed counts; None where nothing was counted."""
    numbers, _ = summarise_arm([dataclasses.asdict(answer) for answer in answers])
    kept = ("tokens", "rounds", "accepted", "tau", "acceptance_by_depth", "repeated_8gram_share")
    tokens = [token for answer in answers for token in answer.tokens]
    sayable = set(draft.head.vocab.tolist()) if draft.head is not None else None
    return {
        "temperature": decode.temperature,
        "responses": len(answers),
        **{name: numbers[name] for name in kept},
        "coverage": sum(t in sayable for t in tokens) / len(tokens) if sayable is not None and tokens else None,
        "verify_ms": 1e3 * numbers["seconds"]["verify"] / numbers["rounds"] if numbers["rounds"] else None,
    }


def step_cost(draft: Draft, chain_length: int, meter: Meter) -> float:
    """Median milliseconds of one more drafted token of a chain of two or more, after the last response."""

    def seconds(length: int) -> float:
        meter.start()
        draft.propose(length)
        return sum(meter.stop().values())

    return 1e3 * statistics.median((seconds(chain_length) - seconds(1)) / (chain_length - 1) for _ in range(REPEATS))


def table(result: dict[str, Any], depths: int) -> Table:
    """One row a temperature."""
    made = Table(title=f"{result['draft']} on {result['workload']}: {result['conversations']} conversations")
    titles = (
        "T",
        "tokens",
        "tau",
        *(f"depth {d + 1}" for d in range(depths)),
        "coverage",
        "draft step",
        "verify pass",
    )
    for title in titles:
        made.add_column(title, justify="right", no_wrap=True)
    for row in result["rows"]:
        made.add_row(
            f"{row['temperature']:g}",
            str(row["tokens"]),
            number(row["tau"], 2),
            *(number(share, 3) for share in row["acceptance_by_depth"] or [None] * depths),
            number(row["coverage"], 3),
            number(result["draft_step_ms"], 1, " ms"),
            number(row["verify_ms"], 1, " ms"),
        )
    return made
