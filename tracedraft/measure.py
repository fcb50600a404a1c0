"""One run: a stream of conversations answered by a fixed and an adapted arm, side by side."""

from __future__ import annotations

import dataclasses
import json
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from tracedraft import chat, counts, records
from tracedraft import mirror as rows
from tracedraft import summary as summaries
from tracedraft.adapters.fixed import FixedSpec
from tracedraft.arms import Arm, build_arms, keep, resume
from tracedraft.auto import AutoSpec
from tracedraft.calibrate import planned
from tracedraft.config import plain
from tracedraft.decode import DecodeSpec, audit, respond, respond_plainly
from tracedraft.errors import UserError
from tracedraft.identity import identify
from tracedraft.interfaces import Draft
from tracedraft.meter import Meter
from tracedraft.prefix import Prefix
from tracedraft.progress import Progress
from tracedraft.provenance import provenance
from tracedraft.recorded import replaying
from tracedraft.target import Served
from tracedraft.tracking import Tracker, open_tracker, sigterm_as_exit
from tracedraft.transcript import Transcript
from tracedraft.types import Conversation, Response
from tracedraft.verify import noise_key

WARM_UP_TOKENS = 24
PLAIN = "plain"  # the arm without a draft
ALL_THREADS = torch.get_num_threads()


@dataclass(frozen=True)
class Bench:
    """What all arms run on.

    Attributes:
        plain: decoding without a draft is timed beside them.
        recordings: where the target's part of responses is kept; nothing is timed then. None: it works live.
        replays: the fixed arm's responses to recordings, which every run of a sweep asks for again.
    """

    served: Served
    decode: DecodeSpec
    seed: int
    meter: Meter
    plain: bool = False
    recordings: Path | None = None
    replays: dict[str, Response] = dataclasses.field(default_factory=dict)


def measure(
    cfg: DictConfig, folder: Path, sweep: str | None, workers: int = 1, argv: Sequence[str] | None = None
) -> dict[str, Any]:
    """Run one configuration and leave its record in ``folder``.

    Args:
        sweep: name of the sweep that this run belongs to, which becomes its W&B group.
        workers: how many of this machine's processes run at once, which timings depend on.
        argv: the user's command, where that is not this process's.

    Returns:
        the summary, as written.

    Raises:
        UserError: bad input; whatever was on disk stays as it was.
    """
    run = identify(cfg)
    specs, conversations = run.specs, run.conversations
    if done := records.finished(folder, run.fingerprint):
        lost = cfg.keep_learner and records.last_learner(folder) is None
        without = ", without its learner: choose another hydra.run.dir to have it kept" if lost else ""
        print(f"{folder} holds this run already, finished{without}", file=sys.stderr)
        return done
    torch.set_num_threads(cfg.threads or ALL_THREADS)
    served = loaded(specs["target"])
    arms, draft = build_arms(specs, served, cfg.seed)
    bench = Bench(served, specs["decode"], cfg.seed, Meter(served.target.device), cfg.plain, **recordings(cfg, draft))
    check_cache(bench, [arm.draft for arm in arms], conversations)
    identity = {"fingerprint": run.fingerprint, "data": run.data}
    names = {group: spec.name for group, spec in specs.items()}
    weights = {"target_weights": served.provenance, "draft_weights": draft}
    bench, plan = with_plan(bench, arms[0].draft, draft["sha256"], records.read_attempts(folder))
    experiment = cfg.wandb.group or sweep or "single"
    origin = {**provenance(argv), **identity, **weights, "workers": workers, "experiment": experiment, **plan}
    config = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(config, dict)
    with records.RunDir.open(folder, {str(k): v for k, v in config.items()}, origin) as record, sigterm_as_exit():
        tracker = mirror_of(cfg, counts.header(config, records.read_attempts(folder), folder, experiment), folder)
        summary, code = {}, 1
        try:
            done = stream(bench, arms, conversations, Progress(len(conversations), names), record, tracker.log)
            attempts = {"attempts": records.read_attempts(folder)}
            tracker.table("updates", rows.UPDATE_COLUMNS, rows.update_table(done))
            summary = {**names, **conclusion(done, arms[1]), "provenance": {**origin, **attempts}}
            record.write_summary({**summary, "wandb_error": tracker.error}, cfg.keep_learner)
            code = 0
        finally:
            for arm in arms:
                arm.close()
            tracker.finish({k: v for k, v in summary.items() if k != "provenance"}, code)
            if tracker.error:
                print(f"warning: {tracker.error}; the record on disk is whole", file=sys.stderr)
        if tracker.error:
            record.write_summary({**summary, "wandb_error": tracker.error})
    return summary


def mirror_of(cfg: DictConfig, header: dict[str, Any], folder: Path) -> Tracker:
    """A W&B run for this attempt, the last in the header."""
    attempt = f"{header['fingerprint']}-a{len(header['attempts'])}"
    return open_tracker(
        **{key: cfg.wandb[key] for key in ("mode", "project", "entity", "tags")},
        group=header["experiment"],
        job_type=cfg.adapter.name,
        config=counts.flat(header),
        run_dir=folder,
        run_id=f"{attempt}-{uuid.uuid4().hex[:6]}",
        hidden=(rows.COUNTS,),
        of_rows=rows.OF_ROWS,
    )


def with_plan(
    bench: Bench, draft: Draft, weights: str | None, attempts: list[dict[str, Any]]
) -> tuple[Bench, dict[str, Any]]:
    """The bench with what ``decode=auto`` goes by, the same in every attempt, and that for the record."""
    decode = bench.decode
    if not isinstance(decode, AutoSpec):
        return bench, {}
    if attempts:
        decode = dataclasses.replace(decode, plan=attempts[0]["plan"])
    decode = planned(decode, bench.served, draft, weights, bench.meter)
    return dataclasses.replace(bench, decode=decode), {"plan": decode.plan}


def conclusion(done: list[dict[str, Any]], arm: Arm) -> dict[str, Any]:
    """The summary's numbers."""
    numbers, bounds = summaries.summarise(done), summaries.intervals(done)
    reasons = numbers["null_reasons"] | bounds.pop("null_reasons")
    if arm.state() is not None:
        bounds["interval_caveat"] = (
            "the learner keeps what it learns, so its conversations depend on each other: "
            "compare three or more orders (workload.seed) before trusting the interval"
        )
    learner = {"drift": done[-1]["drift"] if done else {}, "anchor_lambda": arm.adapter.anchor_lambda()}
    return {**numbers, **bounds, **learner, "null_reasons": reasons}


def recordings(cfg: DictConfig, draft: dict[str, str | None]) -> dict[str, Any]:
    """Where ``measure=acceptance`` keeps the target's part, and the fixed arm's responses known so far."""
    if cfg.measure != "acceptance":
        return {}
    groups = {group: OmegaConf.to_container(cfg[group], resolve=True) for group in ("target", "draft", "decode")}
    known = _REPLAYS.setdefault(json.dumps([groups, draft["sha256"]], sort_keys=True), {})
    return {"recordings": Path(cfg.paths.recordings), "replays": known}


_LOADED: dict[str, Served] = {}
loads = 0  # of targets, by this process
_REPLAYS: dict[str, dict[str, Response]] = {}


def loaded(spec: Any) -> Served:
    """The built target, kept for the next run of a sweep: loading one costs more than many a run."""
    key = json.dumps([plain(spec), spec.provenance()["sha256"]], sort_keys=True)
    if key not in _LOADED:
        global loads
        _LOADED.clear()
        _LOADED[key] = spec.build()
        loads += 1
    return _LOADED[key]


def check_cache(bench: Bench, drafts: list[Draft], conversations: list[Conversation]) -> None:
    """Raises UserError when the KV caches of the longest conversation cannot fit into memory."""
    target, tokenizer, longest = bench.served.target, bench.served.tokenizer, 0
    for conversation in conversations:
        questions = [{"role": "user", "content": turn} for turn in conversation.turns]
        answer = {"role": "assistant", "content": "."}
        history = [message for question in questions for message in (question, answer)][:-1]
        prompt = len(chat.encode(tokenizer, history))
        longest = max(longest, prompt + (len(questions) - 1) * bench.decode.max_new_tokens)
    capacity = bench.decode.draft_capacity(min(longest, target.context), target.context)  # the larger one
    each = sum(draft.row_bytes for draft in drafts)
    if max((len(conversation.turns) for conversation in conversations), default=1) == 1:
        return target.check_memory(capacity, 1, each)
    # Each arm keeps its last turn's caches until its next turn has begun.
    target.check_memory(capacity, 1 + len(drafts) + bench.plain, 2 * each)


def stream(
    bench: Bench,
    arms: list[Arm],
    conversations: list[Conversation],
    progress: Progress,
    run: records.RunDir,
    mirror: Callable[[dict[str, Any], int], None],
) -> list[dict[str, Any]]:
    """Serve in order what no earlier attempt did; each record is on disk before it is mirrored."""
    done = list(run.done)
    progress.resume(done)
    for index, record in enumerate(done):  # each attempt is a W&B run of its own, and the newest shows all
        mirror(rows.row(record), index)
    resume(arms, run, bench.seed)
    if len(done) == len(conversations):
        return done
    if bench.recordings is None:
        warm_up(bench, [arm.draft for arm in arms], conversations)
    with progress:
        for index, conversation in enumerate(conversations[len(done) :], len(done)):
            record = converse(bench, arms, conversation, index, progress.response)
            keep(arms, run, index + 1, record["outer"])
            run.append(record)
            done.append(record)
            mirror(rows.row(record), index)
            progress.conversation(record)
    return done


def warm_up(bench: Bench, drafts: list[Draft], conversations: list[Conversation]) -> None:
    """A short untimed answer of each arm, or the first would pay for what all need."""
    prompts = (
        chat.encode(bench.served.tokenizer, [{"role": "user", "content": conversation.turns[0]}])
        for conversation in conversations
    )
    prompt = next((prompt for prompt in prompts if len(prompt) < bench.served.target.context), None)
    if prompt is None:
        return
    spec = dataclasses.replace(bench.decode, max_new_tokens=min(WARM_UP_TOKENS, bench.decode.max_new_tokens))
    for draft in drafts:
        respond(bench.served.target, draft, FixedSpec("fixed").build(None, 0), prompt, spec, 0, bench.meter)
    if bench.plain:
        respond_plainly(bench.served.target, prompt, spec, 0, bench.meter)


def serve(
    bench: Bench, conversation: Conversation, answer: Callable[[int, list[int], int], str]
) -> dict[str, int] | None:
    """Put each turn in order to ``answer(turn, prompt, noise key)``, which returns what the history then says.

    Returns:
        the first turn that is too long for the target's context, where the conversation ends; None without one.
    """
    target, history = bench.served.target, []
    for turn, question in enumerate(conversation.turns):
        history.append({"role": "user", "content": question})
        prompt = chat.encode(bench.served.tokenizer, history)
        if len(prompt) >= target.context:
            return {"turn": turn, "tokens": len(prompt), "context": target.context}
        text = answer(turn, prompt, noise_key(bench.seed, conversation, turn))
        history.append({"role": "assistant", "content": text})
    return None


def converse(
    bench: Bench,
    arms: list[Arm],
    conversation: Conversation,
    index: int,
    report: Callable[[str, Response], None],
) -> dict[str, Any]:
    """Answer every turn with each arm, in turned order on odd conversations, and audit the answers."""
    by_name = {arm.name: arm for arm in arms}
    prefixes = {name: Prefix() for name in (*by_name, PLAIN)} if len(conversation.turns) > 1 else {}
    order = [*by_name, *([PLAIN] if bench.plain else [])][:: 1 if index % 2 == 0 else -1]
    turns: list[dict[str, Any]] = []
    for arm in arms:
        arm.begin_conversation(conversation, bench.seed)

    def answer(turn: int, prompt: list[int], key: int) -> str:
        answers = {}
        for name in order:
            arm = by_name.get(name)
            for other in arms:
                other.rest(other is not arm)
            transcript = Transcript() if arm and arm.outer else None
            answers[name] = response_of(bench, arm, prompt, key, prefixes.get(name), transcript)
            if arm and arm.outer and transcript:
                arm.outer.observe(transcript.lesson(conversation.domain))
            report(name, answers[name])
        for arm in arms:  # or learning in the background had the audit's time for nothing
            arm.rest(True)
        turns.append(turn_record(bench, turn, prompt, answers, key))
        return turns[-1]["text"]

    refused = serve(bench, conversation, answer)
    adapted = [turn["arms"]["adapted"]["seconds"] for turn in turns]
    seconds = None if bench.recordings else sum(sum(each.values()) for each in adapted)
    return {
        "index": index,
        "id": conversation.id,
        "domain": conversation.domain,
        "occurrence": conversation.occurrence,
        "order": order,
        "refused": refused,
        "turns": turns,
        "drift": arms[1].adapter.drift(),
        "outer": arms[1].end_conversation(seconds, bench.seed),
    }


def response_of(
    bench: Bench,
    arm: Arm | None,
    prompt: list[int],
    key: int,
    prefix: Prefix | None,
    transcript: Transcript | None = None,
) -> Response:
    """One arm's response; None: the arm without a draft."""
    target = bench.served.target
    if arm is None:
        return respond_plainly(target, prompt, bench.decode, key, bench.meter, prefix)
    if bench.recordings is None:
        return respond(target, arm.draft, arm.adapter, prompt, bench.decode, key, bench.meter, prefix, transcript)
    replayed = replaying(bench.served, arm.draft, prompt, bench.decode, key, bench.recordings)
    known = bench.replays if arm.name == "fixed" else {}
    if replayed.name not in known:
        response = respond(
            replayed, arm.draft, arm.adapter, prompt, bench.decode, key, bench.meter, prefix, transcript
        )
        if response.tokens != replayed.tokens:
            raise UserError(
                f"{bench.recordings / replayed.name}.safetensors: its replay says something else than was "
                "recorded, as after a change of the decoder: delete it"
            )
        known[replayed.name] = dataclasses.replace(response, seconds={})
    return known[replayed.name]


def turn_record(bench: Bench, turn: int, prompt: list[int], answers: dict[str, Response], key: int) -> dict[str, Any]:
    """Counts of all arms, and the audit of each distinct response against the target alone."""
    paired = not (bench.decode.sampling(key).rejection and bench.decode.temperature > 0)
    # Under rejection sampling there is nothing to compare with: other draws are as right.
    audits = paired and bench.recordings is None
    distinct = sorted({tuple(answer.tokens) for answer in answers.values()}) if audits else []
    wrong = [w for tokens in distinct for w in audit(bench.served.target, prompt, tokens, bench.decode, key)]
    ties = sum(w.near_tie for w in wrong)
    found = [{**dataclasses.asdict(w), "near_tie": w.near_tie} for w in wrong]
    adapted = answers["adapted"]
    return {
        "turn": turn,
        "prompt_tokens": len(prompt),
        "text": chat.decode(bench.served.tokenizer, answers["fixed"].tokens),
        "paired": paired,
        "lossless": {
            "audited": sum(map(len, distinct)),
            "mismatches": len(wrong) - ties,
            "near_ties": ties,
            "differing": found,
        },
        "not_updated": None if adapted.updates else f"ended after {adapted.rounds} rounds without an update due",
        "arms": {name: dataclasses.asdict(answer) for name, answer in answers.items()},
    }
