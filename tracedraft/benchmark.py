"""``tracedraft bench``: plain decoding beside transformers' ``generate``, speculation beside plain decoding, and the
share of its time that a learner takes; interleaved in one process, over the same prompts."""

from __future__ import annotations

import copy
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import Progress

from tracedraft import chat
from tracedraft.adapters.fixed import FixedSpec
from tracedraft.config import build_spec, check_settings, fingerprint, plain
from tracedraft.decode import mismatch, respond, respond_plainly
from tracedraft.errors import UserError
from tracedraft.files import write_atomically
from tracedraft.interfaces import Draft, InnerAdapter
from tracedraft.measure import ALL_THREADS, Bench, check_cache, loaded
from tracedraft.meter import Meter
from tracedraft.provenance import provenance
from tracedraft.report import MISSING, markdown, number
from tracedraft.summary import summarise_arm
from tracedraft.types import Conversation, Response
from tracedraft.verify import noise_key
from tracedraft.workloads.prompts import NoSource

GENERATE, PLAIN, SPECULATION = "generate", "plain", "speculation"
RATIOS = {"plain_over_generate": (PLAIN, GENERATE), "speculation_over_plain": (SPECULATION, PLAIN)}
LEARNING = ("observe", "update")  # the phases that a draft which never changes could do without
RESULT = "bench.json"
WARM_UP_TOKENS = 16

Answer = Callable[[Bench, list[int], int], Response]  # to a prompt, with the key of its sampling noise
Answers = dict[str, list[Response]]  # by arm, in the order of the prompts


@dataclass(frozen=True)
class Question:
    """A prompt [L], with the key of its sampling noise."""

    id: str
    prompt: list[int]
    key: int


def benchmark(cfg: DictConfig, folder: Path) -> tuple[dict[str, Any], Path]:
    """Answer every prompt with every arm, several times over.

    Returns:
        the result, and the JSON file that holds it: ``out``, or one in ``folder``.

    Raises:
        UserError: bad input; nothing is written.
    """
    check_settings(cfg)
    specs: dict[str, Any] = {group: build_spec(cfg[group], group) for group in ("target", "draft", "decode")}
    adapters = {str(name): build_spec(node, f"adapters.{name}") for name, node in cfg.adapters.items()}
    pairs = RATIOS | {f"{name}_over_{SPECULATION}": (name, SPECULATION) for name in adapters}
    aims = aims_of(cfg, pairs)
    specs["workload"], conversations, data = prompts(cfg)
    specs["draft"].check(specs["target"].shape())
    torch.set_num_threads(cfg.threads or ALL_THREADS)
    machine = {**provenance(), "load_average": psutil.getloadavg()[0]}
    served = loaded(specs["target"])
    bench = Bench(served, specs["decode"], cfg.seed, Meter(served.target.device))
    built = {name: specs["draft"].build(served.target) for name in (SPECULATION, *adapters)}
    drafts, weights = {name: draft for name, (draft, _) in built.items()}, built[SPECULATION][1]
    opened = [dataclasses.replace(conversation, turns=conversation.turns[:1]) for conversation in conversations]
    check_cache(bench, list(drafts.values()), opened)
    asked = questions(bench, conversations)
    arms, restart = own_arms(drafts, {SPECULATION: FixedSpec("fixed"), **adapters}, cfg.seed)
    reference, reason = generate_arm(bench, dict(cfg.generate))
    if reference is not None:
        arms = {GENERATE: reference, **arms}
    done = interleave(bench, arms, asked, cfg.repetitions, restart)
    ratios = {name: ratio(done, *pair) for name, pair in pairs.items()}
    contents = {"target": served.provenance["sha256"], "draft": weights["sha256"], "workload": data["sha256"]}
    identity = fingerprint({**specs, **adapters, "seed": cfg.seed, "generate": dict(cfg.generate)}, contents)
    result = {
        **{group: spec.name for group, spec in specs.items()},
        "prompts": [question.id for question in asked],
        "arms": {name: arm_numbers([answers[name] for answers in done]) for name in arms},
        "ratios": ratios,
        "aims": {name: verdict(aim, ratios[name], specs) for name, aim in aims.items()},
        "parted": {name: parted(bench, asked, done[0], *pair) for name, pair in RATIOS.items()},
        "null_reasons": {GENERATE: reason} if reason else {},
        "specs": plain({**specs, "adapters": adapters}),
        "provenance": {**machine, "fingerprint": identity, "data": data, "draft_weights": weights},
    }
    file = Path(cfg.out) if cfg.out else folder / RESULT
    content = json.dumps(result, indent=1) + "\n"
    write_atomically(file, lambda path: path.write_text(content), "choose another out=FILE")
    return result, file


def aims_of(cfg: DictConfig, ratios: dict[str, Any]) -> dict[str, Any]:
    """Raises UserError for an aim at what is not compared."""
    aims = OmegaConf.to_container(cfg.aims, resolve=True)
    assert isinstance(aims, dict)
    if unknown := [str(name) for name in aims if name not in ratios]:
        raise UserError(f"aims.{unknown[0]}: expected one of {', '.join(ratios)}")
    return {str(name): aim for name, aim in aims.items()}


def prompts(cfg: DictConfig) -> tuple[Any, list[Conversation], dict[str, str | None]]:
    """The workload and what it loads; the stand-in's where no source has its prompts."""
    spec = build_spec(cfg.workload, "workload")
    try:
        return spec, *spec.load()
    except NoSource:
        other = build_spec(cfg.stand_in, "stand_in")
        print(f"no source has the prompts of {spec.name} (see paths.data): {other.name} stands in", file=sys.stderr)
        return other, *other.load()


def questions(bench: Bench, conversations: list[Conversation]) -> list[Question]:
    """First turns that leave room for an answer.

    Raises:
        UserError: none does.
    """
    target, asked = bench.served.target, []
    for conversation in conversations:
        prompt = chat.encode(bench.served.tokenizer, [{"role": "user", "content": conversation.turns[0]}])
        if len(prompt) < target.context:
            asked.append(Question(conversation.id, prompt, noise_key(bench.seed, conversation, 0)))
    if not asked:
        raise UserError(f"every prompt is longer than the target's context of {target.context} tokens")
    return asked


def own_arms(
    drafts: dict[str, Draft], adapters: dict[str, Any], seed: int
) -> tuple[dict[str, Answer], Callable[[], None]]:
    """Decoding without a draft, and with each adapter on a draft of its own; and what makes all of them forget."""

    def plainly(bench: Bench, prompt: list[int], key: int) -> Response:
        return respond_plainly(bench.served.target, prompt, bench.decode, key, bench.meter)

    learners = {name: adapters[name].build(draft.head, seed) for name, draft in drafts.items()}
    initial = copy.deepcopy({name: learner.state() for name, learner in learners.items()})

    def restart() -> None:
        for name, learner in learners.items():
            if state := initial[name]:
                learner.load_state(state)

    return {PLAIN: plainly} | {n: speculating(drafts[n], learner) for n, learner in learners.items()}, restart


def speculating(draft: Draft, adapter: InnerAdapter) -> Answer:
    def answer(bench: Bench, prompt: list[int], key: int) -> Response:
        adapter.begin_conversation()
        return respond(bench.served.target, draft, adapter, prompt, bench.decode, key, bench.meter)

    return answer


def generate_arm(bench: Bench, options: dict[str, Any]) -> tuple[Answer | None, str | None]:
    """transformers' greedy ``generate`` with the same weights at the same precision, or the reason without it."""
    target, folder = bench.served.target, bench.served.folder
    if bench.decode.temperature > 0:
        return None, "generate is compared greedily only: decode.temperature=0"
    if folder is None:
        return None, "the target's weights lie in no folder that transformers could read"
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        dtype = target.model.norm.weight.dtype
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        return None, f"transformers can't load {folder}: {str(error).splitlines()[0]}"
    model.to(target.device).eval()

    def answer(bench: Bench, prompt: list[int], key: int) -> Response:
        limit = min(bench.decode.max_new_tokens, target.context - len(prompt))
        ends = sorted(target.eos_ids) or None
        bench.meter.start()
        ids = torch.tensor([prompt], device=target.device)
        given = {"attention_mask": torch.ones_like(ids), "eos_token_id": ends, "pad_token_id": 0, **options}
        with torch.inference_mode():
            tokens = model.generate(ids, max_new_tokens=limit, do_sample=False, **given)[0, len(prompt) :].tolist()
        seconds = bench.meter.stop()
        ended = "eos" if tokens[-1] in target.eos_ids else "limit"
        return Response(tokens, ended, 0, 0, 0, [], [], [], [], seconds)

    return answer, None


def interleave(
    bench: Bench,
    arms: dict[str, Answer],
    asked: list[Question],
    repetitions: int,
    restart: Callable[[], None],
) -> list[Answers]:
    """Every question answered by every arm in each repetition, which no learner has met before.

    The order of the arms is turned from question to question and from repetition to repetition, so that what
    drifts in the machine falls on all of them alike.
    """
    short = dataclasses.replace(bench.decode, max_new_tokens=min(WARM_UP_TOKENS, bench.decode.max_new_tokens))
    for answer in arms.values():
        answer(dataclasses.replace(bench, decode=short), asked[0].prompt, asked[0].key)
    console, done = Console(stderr=True), []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("bench", total=repetitions * len(asked) * len(arms))
        for repetition in range(repetitions):
            restart()
            answers: Answers = {name: [] for name in arms}
            for i, question in enumerate(asked):
                for name in list(arms)[:: 1 if (repetition + i) % 2 == 0 else -1]:
                    answers[name].append(arms[name](bench, question.prompt, question.key))
                    bar.advance(task)
            done.append(answers)
            so_far = ", ".join(f"{name} {ms_per_token(made):.1f}" for name, made in answers.items())
            line = f"repetition {repetition + 1}/{repetitions}, ms a token: {so_far}"
            console.print(line, highlight=False, soft_wrap=True)
    return done


def ms_per_token(answers: list[Response]) -> float:
    """Of prefill and decoding together."""
    return 1e3 * sum(sum(answer.seconds.values()) for answer in answers) / sum(len(a.tokens) for a in answers)


def spread(values: list[float]) -> dict[str, Any]:
    """Median and quartiles of the repetitions; one alone has no quartiles."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive")[::2] if len(values) > 1 else None
    return {"median": statistics.median(values), "quartiles": quartiles, "values": values}


def arm_numbers(repetitions: list[list[Response]]) -> dict[str, Any]:
    """One arm's times and counts; what does not apply to it is None."""
    rows = [summarise_arm([dataclasses.asdict(answer) for answer in answers])[0] for answers in repetitions]
    accepted, rounds = (sum(row[name] for row in rows) for name in ("accepted", "rounds"))
    learning = [sum(row["seconds"][p] for p in LEARNING) / sum(row["seconds"].values()) for row in rows]
    return {
        "ms_per_token": spread([ms_per_token(answers) for answers in repetitions]),
        "tau": (accepted + rounds) / rounds if rounds else None,
        "learning_share": spread(learning) if any(learning) else None,
        "repetitions": [{name: row[name] for name in ("tokens", "rounds", "accepted", "seconds")} for row in rows],
    }


def ratio(done: list[Answers], ours: str, other: str) -> dict[str, Any] | None:
    """How many times as fast as the other arm ours made a token, by repetition; None without one of them."""
    if not {ours, other} <= done[0].keys():
        return None
    return spread([ms_per_token(answers[other]) / ms_per_token(answers[ours]) for answers in done])


def verdict(aim: dict[str, Any], found: dict[str, Any] | None, specs: dict[str, Any]) -> dict[str, Any]:
    """Whether the median reached the aim; None, with the reason, where that can't be said."""
    reason = None
    if found is None:
        reason = "not measured"
    elif specs["decode"].temperature != 0:
        reason = "stated for temperature 0"
    elif aim["workload"] not in (None, specs["workload"].name):
        reason = f"stated for {aim['workload']}"
    met = found["median"] >= aim["ratio"] if found is not None and reason is None else None
    return {**aim, "met": met, "reason": reason}


def parted(bench: Bench, asked: list[Question], answers: Answers, ours: str, other: str) -> dict[str, Any] | None:
    """Where two arms first chose different tokens, both scored at a higher precision; None without one of them."""
    if not {ours, other} <= answers.keys():
        return None
    target, first = bench.served.target, []
    for question, a, b in zip(asked, answers[ours], answers[other], strict=True):
        at = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y), None)
        if at is not None:
            prefix, sampling = [*question.prompt, *a.tokens[:at]], bench.decode.sampling(question.key)
            found = mismatch(target, prefix, at, b.tokens[at], a.tokens[at], sampling)
            first.append({"id": question.id, **dataclasses.asdict(found), "near_tie": found.near_tie})
    ties = sum(found["near_tie"] for found in first)
    return {"prompts": len(asked), "parted": len(first), "near_ties": ties, "first": first}


def text(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    rate = [["arm", "ms a token", "tokens/s", "tau", "observe + update"]]
    for name, arm in result["arms"].items():
        ms = arm["ms_per_token"]["median"]
        share = between(arm["learning_share"], 1, 100, " %")
        rate.append([name, between(arm["ms_per_token"], 1), f"{1e3 / ms:.1f}", number(arm["tau"], 2), share])
    ratios = [["ratio of speed", "median [quartiles]", "aim", "reached"]]
    for name, found in result["ratios"].items():
        aim = result["aims"].get(name, {"ratio": None, "met": None, "reason": ""})
        reached = {True: "yes", False: "no", None: MISSING}[aim["met"]]
        reason = f" ({aim['reason']})" if aim["reason"] else ""
        ratios.append([name.replace("_", " "), between(found, 2), number(aim["ratio"], 2), reached + reason])
    tables = (markdown(rate, ("arm",)), markdown(ratios, ("ratio of speed", "reached")))
    return "\n".join((headline(result), *tables, "".join(f"- {line}\n" for line in remarks(result))))


def headline(result: dict[str, Any]) -> str:
    origin, specs = result["provenance"], result["specs"]
    machine, versions = origin["hardware"], origin["versions"]
    first = next(iter(result["arms"].values()))
    return (
        f"{machine['cpu']}, {machine['logical_cores']} cores, {', '.join(machine['gpus']) or 'no GPU'}; "
        f"{origin['torch_threads']} threads, load before {origin['load_average']:.1f}; torch {versions['torch']}, "
        f"transformers {versions['transformers']}\n"
        f"{result['target']} in {specs['target']['dtype']} on {specs['target']['device']}, draft {result['draft']}, "
        f"temperature {specs['decode']['temperature']:g}; {len(result['prompts'])} prompts of {result['workload']}, "
        f"at most {specs['decode']['max_new_tokens']} tokens each, {len(first['repetitions'])} repetitions: "
        "median [quartiles]\n"
    )


def remarks(result: dict[str, Any]) -> list[str]:
    lines = []
    for name, found in result["parted"].items():
        if found is not None:
            ours, other = RATIOS[name]
            lines.append(
                f"{other} and {ours} chose other tokens from some place on in {found['parted']} of "
                f"{found['prompts']} answers, {found['near_ties']} of them at a near-tie"
            )
    return lines + [f"{name} was not measured: {reason}" for name, reason in result["null_reasons"].items()]


def between(found: dict[str, Any] | None, digits: int, times: float = 1, unit: str = "") -> str:
    if found is None:
        return MISSING
    bounds = [number(times * bound, digits) for bound in found["quartiles"] or []]
    return number(times * found["median"], digits, unit) + (f" [{', '.join(bounds)}]" if bounds else "")
