"""Turns of a conversation share their prefix's caches: bit for bit what prefilling it again gives, for every arm."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import CPU, chain, tiny, tree
from decode_cases import FIXED, adapter_spec, lens, lm
from run_cases import CHAT, composed, conversations, prompts_file
from test_decode import INNER
from torch import Tensor

from tracedraft import measure as measuring
from tracedraft.decode import audit, respond, respond_plainly
from tracedraft.measure import measure
from tracedraft.meter import Meter
from tracedraft.models.graphs import StaticPasses
from tracedraft.models.tiny import TinyTargetSpec
from tracedraft.prefix import Prefix, prefill
from tracedraft.target import LlamaTarget
from tracedraft.types import Response
from tracedraft.verify import Sampling

GREEDY = Sampling(0.0, 1.0, 0)
DTYPES = ["float32", "bfloat16"]
CHUNK = 16


def text(count: int, seed: int = 0) -> list[int]:
    return torch.randint(250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def prefilled(target: LlamaTarget, draft, prompt: list[int], capacity: int, prefix: Prefix) -> list[Tensor]:
    """All that a prefill leaves: outputs, and the rows of both caches."""
    target.begin(capacity, 8, CHUNK)
    draft.begin(capacity, prompt[0])
    made = prefill(target, draft, prompt, CHUNK, GREEDY, prefix)
    size = len(prompt)
    return [*made, draft.last, target.rows(size).clone(), draft.rows(size).clone()]


def fed(target: LlamaTarget, monkeypatch) -> list[int]:
    """How many tokens each of its prefills consumes from now on."""
    counted, honest = [], target.prefill

    def counting(tokens):
        counted.append(len(tokens))
        return honest(tokens)

    monkeypatch.setattr(target, "prefill", counting)
    return counted


def test_rows_kept_for_later_survive_a_cache_that_is_used_again():
    """As on a GPU, where graphs are bound to their cache's memory."""
    target = TinyTargetSpec("tiny", 0, "cpu", "float32", 1024, {}).build().target
    target.static = StaticPasses(target.model, target.taps, captured=False)
    target.begin(64, 8, CHUNK)
    target.prefill(text(CHUNK))
    kept = target.rows(CHUNK)
    before = kept.clone()
    target.begin(64, 8, CHUNK)
    target.prefill(text(CHUNK, seed=1))
    assert torch.equal(kept, before)


@pytest.mark.parametrize("kind", [lens, lm])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("threads", "capacities"), [(1, (96, 96)), (1, (80, 200)), (1, (200, 113)), (2, (80, 200))])
def test_a_resumed_prefill_is_the_whole_one_bit_for_bit(dtype, threads, capacities, kind):
    """Whatever the lengths of both caches, and whatever the response in between wrote behind the prompt."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        target, shared = tiny(dtype).target, text(41)
        draft, prefix = kind(target), Prefix()
        prefilled(target, draft, [*shared, *text(9, seed=1)], capacities[0], prefix)
        for token in text(12, seed=2):
            target.verify(torch.tensor([token] * 8))
            target.commit(1)
            draft.propose(5)
        longer = [*shared, *text(30, seed=3)]
        resumed = prefilled(target, draft, longer, capacities[1], prefix)
        whole = prefilled(target, kind(target), longer, capacities[1], Prefix())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(resumed, whole, strict=True))


def test_rows_that_a_verification_wrote_are_others():
    """Why the answer is prefilled again with the next question, and proof that the comparison above can tell."""
    target, prompt = tiny("float32").target, text(64)
    target.begin(96, 1, CHUNK)
    target.prefill(prompt)
    own = target.rows(64).clone()
    target.length = 32
    for token in prompt[32:]:
        target.verify(torch.tensor([token]))
        target.commit(1)
    assert torch.equal(target.rows(32), own[..., :32, :])
    assert not torch.equal(target.rows(64), own)


@pytest.mark.parametrize(
    ("shared", "first", "second", "again"),
    [(0, 40, 40, 40), (15, 40, 40, 40), (16, 40, 40, 40), (17, 40, 40, 24), (33, 40, 50, 18), (33, 34, 80, 48),
     (40, 40, 40, 8), (32, 32, 32, 16), (33, 33, 33, 1), (30, 50, 30, 14), (32, 32, 60, 44), (1, 1, 1, 1)],
)  # fmt: skip
def test_whole_chunks_are_shared_up_to_the_first_other_token(shared, first, second, again, monkeypatch):
    """The token after the last shared one is shared too, for the draft reads ahead; and the last one is consumed."""
    target, common = tiny("float32").target, text(shared)
    draft, prefix, counted = lens(target, 200), Prefix(), fed(target, monkeypatch)
    one = [*common, *(3 for _ in range(first - shared))]
    two = [*common, *(4 for _ in range(second - shared))]
    prefilled(target, draft, one, 128, prefix)
    resumed = prefilled(target, draft, two, 128, prefix)
    assert counted == [first, again]
    whole = prefilled(target, draft, two, 128, Prefix())
    assert all(torch.equal(a, b) for a, b in zip(resumed, whole, strict=True))


def turns(target: LlamaTarget, arm, spec, prefixes: list[Prefix | None]) -> list[Response]:
    """Three turns of a conversation, each prompt the history so far; without seconds."""
    history, answers = [], []
    for turn, prefix in enumerate(prefixes):
        history += text(23, seed=10 + turn)
        made = arm(target, list(history), spec, 7 + turn, prefix)
        answers.append(dataclasses.replace(made, seconds={}))
        history += made.tokens
    return answers


def speculating(draft, adapter):
    adapter.begin_conversation()
    return lambda target, prompt, spec, key, prefix: respond(
        target, draft, adapter, prompt, spec, key, Meter(CPU), prefix
    )


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize(("shape", "dtype"), [(chain, "bfloat16"), (chain, "float32"), (tree, "bfloat16")])
def test_answers_counts_and_updates_are_those_without_it(dtype, name, shape, monkeypatch):
    """With learners that draw on the prompt's positions too, whose evidence is kept with the caches."""
    target = tiny(dtype).target
    spec, counted = shape(temperature=0.7, top_p=0.95, cache_bucket=32, max_new_tokens=24), fed(target, monkeypatch)
    made = []
    for shared in (Prefix(), None):
        draft = lens(target, 200)
        made.append(turns(target, speculating(draft, adapter_spec(name).build(draft.head, 0)), spec, [shared] * 3))
    assert made[0] == made[1]
    assert sum(counted[1:3]) < sum(counted[4:])
    assert name in ("fixed", "control_frozen") or any(u.committed for answer in made[0] for u in answer.updates)


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_answers_are_those_without_it(dtype, monkeypatch):
    target, spec = tiny(dtype).target, chain(temperature=0.7)
    counted = fed(target, monkeypatch)

    def plainly(target, prompt, spec, key, prefix):
        return respond_plainly(target, prompt, spec, key, Meter(CPU), prefix)

    assert turns(target, plainly, spec, [Prefix()] * 3) == turns(target, plainly, spec, [None] * 3)
    assert sum(counted[1:3]) < sum(counted[4:])


def test_arms_that_take_turns_do_not_disturb_each_other():
    """They share the target; an audit, and a response of another kind, come in between."""
    target, spec = tiny("bfloat16").target, chain()
    alone = turns(target, speculating(lens(target, 200), FIXED.build(None, 0)), spec, [Prefix()] * 3)
    other, shared = Prefix(), Prefix()
    arm, draft = speculating(lens(target, 200), FIXED.build(None, 0)), lens(target, 100)

    def disturbed(target, prompt, spec, key, prefix):
        respond(target, draft, FIXED.build(None, 0), prompt[::-1], tree(), key, Meter(CPU), other)
        made = arm(target, prompt, spec, key, prefix)
        assert audit(target, prompt, made.tokens, spec, key) == []
        return made

    assert turns(target, disturbed, spec, [shared] * 3) == alone


LONG = ("Tell me of rivers, of lakes, and of the sea.", "And of mountains?", "Which of them is the oldest?")


@pytest.mark.parametrize("how", ["time", "acceptance"])
def test_a_run_records_what_it_records_without_it(how, tmp_path, monkeypatch):
    """Live and replayed, audits included; the conversation of one turn keeps nothing."""
    asked = prompts_file(tmp_path, LONG, ("Why?",), LONG[::-1])
    common = (*CHAT[1:], *asked, "adapter=persistent", "adapter.source=balanced", f"measure={how}")
    plain = f"plain={'true' if how == 'time' else 'false'}"
    cfg = composed(*common, plain, f"paths.recordings={tmp_path}/recordings")
    counted, honest = [], Prefix.resume

    def counting(*args) -> int:
        counted.append(honest(*args))
        return counted[-1]

    monkeypatch.setattr(Prefix, "resume", counting)
    measure(cfg, tmp_path / "with", None)
    assert sum(counted) > 0
    monkeypatch.setattr(measuring, "Prefix", lambda: None)
    measuring._REPLAYS.clear()
    measure(cfg, tmp_path / "without", None)
    measuring._REPLAYS.clear()
    made = []
    for run in ("with", "without"):
        made.append(conversations(tmp_path / run))
        for turn in (turn for record in made[-1] for turn in record["turns"]):
            for answer in turn["arms"].values():
                del answer["seconds"]
    assert made[0] == made[1]
