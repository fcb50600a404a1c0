"""``tracedraft bench``: other engines, plain decoding, speculation in every decode mode, and learners on top of each;
interleaved in one process, over the same prompts, so that every ratio is of times taken side by side."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import Progress

from tracedraft import chat
from tracedraft.adapters.fixed import FixedSpec
from tracedraft.auto import AutoSpec
from tracedraft.benchmark.engines import Engine, Job, Running, find
from tracedraft.benchmark.numbers import (
    PLAIN,
    Answers,
    Pair,
    Question,
    by_workload,
    learner,
    ms_per_token,
    pairs,
    parted,
    together,
    verdict,
)
from tracedraft.calibrate import planned
from tracedraft.config import build_spec, check_settings, fingerprint, plain
from tracedraft.decode import DecodeSpec, respond, respond_plainly
from tracedraft.drafts.eagle3 import Eagle3Spec
from tracedraft.drafts.lm import LmSpec
from tracedraft.errors import UserError
from tracedraft.files import write_atomically
from tracedraft.interfaces import Draft, InnerAdapter
from tracedraft.measure import ALL_THREADS, Bench, check_cache, loaded
from tracedraft.meter import Meter
from tracedraft.provenance import provenance
from tracedraft.types import Conversation, Response
from tracedraft.verify import noise_key
from tracedraft.workloads.prompts import NoSource

RESULT = "bench.json"
WARM_UP_TOKENS = 16

Answer = Callable[[Question, int], Response]  # to a question, in at most so many tokens


def benchmark(cfg: DictConfig, folder: Path) -> tuple[dict[str, Any], Path]:
    """Answer every prompt with every arm, several times over.

    Returns:
        the result, and the JSON file that holds it: ``out``, or one in ``folder``.

    Raises:
        UserError: bad input; nothing is written.
    """
    check_settings(cfg)
    specs: dict[str, Any] = {group: build_spec(cfg[group], group) for group in ("target", "draft")}
    specs |= {"decodes": modes(cfg), "adapters": each(cfg, "adapters")}
    engines = {str(name): find(f"engines.{name}", path) for name, path in cfg.engines.items()}
    compared = pairs(engines, specs["decodes"], specs["adapters"])
    check_names(engines, specs)
    aims = aims_of(cfg, compared)
    specs["workloads"], conversations, data, missing = prompts(cfg)
    specs["draft"].check(specs["target"].shape())
    torch.set_num_threads(cfg.threads or ALL_THREADS)
    machine = {**provenance(), "load_average": psutil.getloadavg()[0]}
    served = loaded(specs["target"])
    bench = Bench(served, next(iter(specs["decodes"].values())), cfg.seed, Meter(served.target.device))
    asked = {name: questions(bench, some) for name, some in conversations.items()}
    fixed, weights = specs["draft"].build(served.target)
    decodes, plans = with_plans(bench, specs["decodes"], fixed, weights["sha256"])
    opened = [dataclasses.replace(one, turns=one.turns[:1]) for some in conversations.values() for one in some]
    arms, restart = own_arms(bench, {**specs, "decodes": decodes}, fixed, opened)
    others, reasons = engine_arms(engines, bench, specs["draft"], next(iter(asked.values()))[0])
    done = interleave({**others, **arms}, asked, cfg.repetitions, bench.decode.max_new_tokens, restart)
    found = by_workload(done, compared)
    sampling = bench.decode.sampling(0)
    contents = {"target": served.provenance["sha256"], "draft": weights["sha256"]}
    contents |= {name: origin["sha256"] for name, origin in data.items()}
    identity = fingerprint({**specs, "seed": cfg.seed, "engines": dict(cfg.engines)}, contents)
    judged = {
        name: parted(served.target, asked, done[0], pair, sampling)
        for name, pair in compared.items()
        if PLAIN in pair
    }
    result = {
        **{group: specs[group].name for group in ("target", "draft")},
        "prompts": {name: [question.id for question in some] for name, some in asked.items()},
        "workloads": found,
        "aims": {name: verdict(aim, name, found, bench.decode.temperature) for name, aim in aims.items()},
        "parted": {name: made and {"arms": compared[name], **made} for name, made in judged.items()},
        "null_reasons": {**missing, **reasons},
        "specs": plain(specs),
        "provenance": {**machine, "fingerprint": identity, "data": data, "draft_weights": weights, "plans": plans},
    }
    file = Path(cfg.out) if cfg.out else folder / RESULT
    content = json.dumps(result, indent=1) + "\n"
    write_atomically(file, lambda path: path.write_text(content), "choose another out=FILE")
    return result, file


def each(cfg: DictConfig, key: str) -> dict[str, Any]:
    return {str(name): build_spec(node, f"{key}.{name}") for name, node in cfg[key].items()}


def modes(cfg: DictConfig) -> dict[str, DecodeSpec]:
    """The decode modes, alike but for their shape: what ``decode`` says holds for all of them.

    Raises:
        UserError: none.
    """
    if not cfg.decodes:
        raise UserError("decodes={}: expected one or more, as +decode@decodes.chain=chain")
    return {str(name): laid_over(node, cfg.decode, f"decodes.{name}") for name, node in cfg.decodes.items()}


def laid_over(node: DictConfig, common: DictConfig, key: str) -> Any:
    """The spec of a config group, but for what is said for all of its kind."""
    merged = OmegaConf.merge(node, common)
    assert isinstance(merged, DictConfig)
    return build_spec(merged, key)


def check_names(engines: dict[str, Engine], specs: dict[str, Any]) -> None:
    """Raises UserError where two arms would have one name."""
    names = [*engines, PLAIN, *specs["decodes"]]
    names += [learner(mode, adapter) for mode in specs["decodes"] for adapter in specs["adapters"]]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{twice[0]!r} names two arms: choose another for the engine, decode mode or adapter")


def aims_of(cfg: DictConfig, compared: dict[str, Pair]) -> dict[str, Any]:
    """Raises UserError for an aim at what is not compared."""
    aims = OmegaConf.to_container(cfg.aims, resolve=True)
    assert isinstance(aims, dict)
    if unknown := [str(name) for name, aim in aims.items() if aim is not None and name not in compared]:
        raise UserError(f"aims.{unknown[0]}: expected one of {', '.join(compared)}; null: no aim")
    return {str(name): aim for name, aim in aims.items() if aim is not None}


def prompts(
    cfg: DictConfig,
) -> tuple[dict[str, Any], dict[str, list[Conversation]], dict[str, Any], dict[str, str]]:
    """The workloads that some source has, by name: spec, conversations and provenance; and why others are missing.

    The stand-in's where no source has any.
    """
    specs, found, data, missing = {}, {}, {}, {}

    def load(name: str, node: DictConfig, key: str) -> None:
        spec = laid_over(node, cfg.workload, key)
        found[name], data[name] = spec.load()
        specs[name] = spec

    for name, node in cfg.workloads.items():
        try:
            load(str(name), node, f"workloads.{name}")
        except NoSource:
            missing[str(name)] = "no source has its prompts (see paths.data)"
    if not found:
        load(cfg.stand_in.name, cfg.stand_in, "stand_in")
    if missing:
        taken = ", ".join(specs)
        print(f"no source has the prompts of {', '.join(missing)} (see paths.data): {taken} it is", file=sys.stderr)
    return specs, found, data, missing


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


def with_plans(
    bench: Bench, decodes: dict[str, DecodeSpec], draft: Draft, weights: str | None
) -> tuple[dict[str, DecodeSpec], dict[str, Any]]:
    """The modes with what those that choose their shapes go by, and that for the record."""
    made = {
        name: planned(decode, bench.served, draft, weights, bench.meter) if isinstance(decode, AutoSpec) else decode
        for name, decode in decodes.items()
    }
    return made, {name: decode.plan for name, decode in made.items() if isinstance(decode, AutoSpec)}


def own_arms(
    bench: Bench, specs: dict[str, Any], fixed: Draft, conversations: list[Conversation]
) -> tuple[dict[str, Answer], Callable[[], None]]:
    """Decoding without a draft; each mode with a draft that never changes, and with each learner on one of its own.

    Returns:
        the arms, and what makes all learners forget.
    """
    arms: dict[str, Answer] = {PLAIN: plainly(bench)}
    drafts, learners = [fixed], []
    for mode, decode in specs["decodes"].items():
        arms[mode] = speculating(bench, decode, fixed, FixedSpec("fixed").build(fixed.head, bench.seed))
    for mode, decode in specs["decodes"].items():
        for name, adapter in specs["adapters"].items():
            draft = specs["draft"].build(bench.served.target)[0]
            drafts.append(draft)
            learners.append(adapter.build(draft.head, bench.seed))
            arms[learner(mode, name)] = speculating(bench, decode, draft, learners[-1])
    for decode in specs["decodes"].values():
        check_cache(dataclasses.replace(bench, decode=decode), drafts, conversations)
    initial = copy.deepcopy([own.state() for own in learners])

    def restart() -> None:
        for own, state in zip(learners, initial, strict=True):
            if state:
                own.load_state(state)

    return arms, restart


def plainly(bench: Bench) -> Answer:
    def answer(question: Question, limit: int) -> Response:
        decode = dataclasses.replace(bench.decode, max_new_tokens=limit)
        return respond_plainly(bench.served.target, question.prompt, decode, question.key, bench.meter)

    return answer


def speculating(bench: Bench, decode: DecodeSpec, draft: Draft, adapter: InnerAdapter) -> Answer:
    def answer(question: Question, limit: int) -> Response:
        shape = dataclasses.replace(decode, max_new_tokens=limit)
        adapter.begin_conversation()
        return respond(bench.served.target, draft, adapter, question.prompt, shape, question.key, bench.meter)

    return answer


def engine_arms(
    engines: dict[str, Engine], bench: Bench, draft: Any, first: Question
) -> tuple[dict[str, Answer], dict[str, str]]:
    """Engines beside ours that answer a first prompt, and why others do not."""
    served, decode = bench.served, bench.decode
    if decode.temperature > 0:
        return {}, dict.fromkeys(engines, "engines are compared greedily only: decode.temperature=0")
    if served.folder is None:
        return {}, dict.fromkeys(engines, "the target's weights lie in no folder that an engine could read")
    arms, reasons = {}, {}
    target = served.target
    job = Job(
        checkpoint=served.folder,
        draft=draft.folder() if isinstance(draft, Eagle3Spec | LmSpec) else None,
        device=target.device,
        dtype=target.model.norm.weight.dtype,
        max_new_tokens=decode.max_new_tokens,
        temperature=decode.temperature,
        context=target.context,
        eos_ids=target.eos_ids,
    )
    for name, engine in engines.items():
        running = Running(engine, job)
        try:
            running.answer(first.prompt)
        except UserError as error:
            reasons[name] = str(error)
        else:
            arms[name] = asking(name, running)
    return arms, reasons


def asking(name: str, running: Running) -> Answer:
    def answer(question: Question, limit: int) -> Response:
        try:
            return running.answer(question.prompt)
        except UserError as error:
            raise UserError(f"engines.{name} failed at {question.id}: {error}") from error

    return answer


def interleave(
    arms: dict[str, Answer],
    asked: dict[str, list[Question]],
    repetitions: int,
    limit: int,
    restart: Callable[[], None],
) -> list[dict[str, Answers]]:
    """Every question answered by every arm in each repetition, in which no learner has met its workload before.

    The order of the arms is turned from question to question and from repetition to repetition, so that what
    drifts in the machine falls on all of them alike.

    Returns:
        for each repetition, the answers by workload.
    """
    first = next(iter(asked.values()))[0]
    for answer in arms.values():
        answer(first, min(WARM_UP_TOKENS, limit))
    console, done = Console(stderr=True), []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("bench", total=repetitions * sum(map(len, asked.values())) * len(arms))
        for repetition in range(repetitions):
            by_name: dict[str, Answers] = {}
            for name, some in asked.items():
                restart()
                by_name[name] = {arm: [] for arm in arms}
                for i, question in enumerate(some):
                    for arm in list(arms)[:: 1 if (repetition + i) % 2 == 0 else -1]:
                        by_name[name][arm].append(arms[arm](question, limit))
                        bar.advance(task)
            done.append(by_name)
            so_far = ", ".join(f"{arm} {ms_per_token(made):.1f}" for arm, made in together(by_name).items())
            line = f"repetition {repetition + 1}/{repetitions}, ms a token: {so_far}"
            console.print(line, highlight=False, soft_wrap=True)
    return done
