"""``decode=auto``: what it decides, against a simulated draft of known chances, and what it leaves on record."""

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from conftest import auto, chain, tiny
from decode_cases import FIXED, lens, respond_with
from run_cases import arms, composed, conversations, untimed

from tracedraft import measure
from tracedraft.auto import Plan, Way
from tracedraft.calibrate import _line, measured, planned
from tracedraft.errors import UserError
from tracedraft.evaluate import evaluate_draft
from tracedraft.meter import Meter
from tracedraft.records import read_attempts
from tracedraft.types import Verdict

CPU = torch.device("cpu")
RUN = ("adapter=reset", "adapter.every=4", "decode=auto", "decode.widths=[8]", "decode.max_new_tokens=40")


def stood(accepted: int, levels: int) -> Verdict:
    ids = torch.zeros(accepted + 1, dtype=torch.long)
    return Verdict(accepted, ids.tolist(), ids, levels, torch.arange(accepted + 1))


def plan(verify: float = 1.0, level: float = 0.1, beams: tuple[int, ...] = (1,), depth: int = 6) -> Plan:
    seconds = [verify + level * levels for levels in range(1, depth + 1)]
    return Plan(16, [Way(b, seconds, [0.5] * depth) for b in beams])


class Scripted:
    """Drafts with a known chance that each level stands after the one before, which it states if asked.

    Attributes:
        chances: of the next round, by beams, one a level.
    """

    def __init__(self):
        self.chances: dict[int, list[float]] = {}

    def propose(self, length, pick=None, more=None):
        return self._levels(1, length, more)

    def propose_tree(self, nodes, depth, top_k, more=None):
        return self._levels(top_k, depth, more)

    def _levels(self, beams, most, more):
        if more is None:
            return most
        stated, levels = torch.tensor(self.chances[beams]).log().cumsum(dim=0), 1
        while more(levels, stated[:levels], stated[levels - 1 : levels]) and levels < most:
            levels += 1
        return levels


def simulate(spec, chances, rounds: int = 4000, seed: int = 0) -> tuple[float, list]:
    """Tokens a second of the plan's time, and the shapes. ``chances(generator)`` gives a round's, by beams."""
    draft, proposer = Scripted(), spec.proposer()
    random = torch.Generator().manual_seed(seed)
    tokens = seconds = 0.0
    made = Plan.read(spec.plan)
    by_beams = {way.beams: way for way in made.ways}
    for _ in range(rounds):
        draft.chances = chances(random)
        levels = proposer.propose(draft, None)
        beams = proposer.shown.way.beams
        luck = torch.rand(levels, generator=random)
        stands = (luck < torch.tensor(draft.chances[beams][:levels])).cumprod(dim=0)
        accepted = int(stands.sum())
        proposer.learn(stood(accepted, levels))
        tokens += accepted + 1
        seconds += by_beams[beams].seconds[levels - 1]
    return tokens / seconds, proposer.shapes


def fixed_rate(shares: list[float], way: Way, levels: int) -> float:
    expected = 1 + sum(math.prod(shares[: depth + 1]) for depth in range(levels))
    return expected / way.seconds[levels - 1]


@pytest.mark.parametrize("confident", [True, False])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("level", [0.01, 0.1, 0.4])
def test_of_a_draft_of_one_chance_it_finds_the_best_length(share, level, confident):
    """Every round is alike, so the best policy is the best fixed length. 4,000 rounds: the mean of 1 + accepted (at
    most 7, sd under 2.2) is off by under 2 % at one sigma, so 5 % below it would be 2.5 of them."""
    made = plan(level=level)
    best = max(fixed_rate([share] * 6, made.ways[0], levels) for levels in range(1, 7))
    spec = auto(plan=asdict(made), beams=[1], confident=confident)
    rate, shapes = simulate(spec, lambda _: {1: [share] * 6})
    assert rate > 0.95 * best
    lengths = [levels for _, levels in shapes[-500:]]
    kept = max(set(lengths), key=lengths.count)
    assert fixed_rate([share] * 6, made.ways[0], kept) > 0.98 * best


def test_a_draft_that_knows_when_it_is_wrong_is_stopped_there():
    """Half of all rounds are hopeless and the draft says so: better than any one length, and than not asking."""
    made = plan(level=0.2)

    def chances(random):
        sure = bool(torch.rand(1, generator=random) < 0.5)
        return {1: [0.95 if sure else 0.05] * 6}

    asked, shapes = simulate(auto(plan=asdict(made), beams=[1], confident=True), chances)
    blind, _ = simulate(auto(plan=asdict(made), beams=[1], confident=False), chances)
    mixed = [
        sum(fixed_rate([share] * 6, made.ways[0], n) for share in (0.95, 0.05)) / 2 for n in range(1, 7)
    ]  # of rounds of one length, whose times are equal
    assert asked > 1.1 * max(mixed)
    assert asked > 1.1 * blind
    assert {levels for _, levels in shapes} >= {1, 6}


@pytest.mark.parametrize("better", [1, 4])
def test_the_better_way_is_found_and_the_other_looked_at_again(better):
    made = plan(beams=(1, 4))
    shares = {1: [0.3] * 6, 4: [0.3] * 6} | {better: [0.7] * 6}
    spec = auto(plan=asdict(made), probe_every=10)
    _, shapes = simulate(spec, lambda _: shares, rounds=1000)
    used = [beams for beams, _ in shapes[200:]]
    assert used.count(better) >= 0.85 * len(used)
    assert len(set(used)) == 2


def test_a_draft_that_overstates_is_corrected():
    """It says 0.9 and 0.3 stands: after some rounds that is what counts."""
    made = plan(level=0.3)

    draft = Scripted()
    draft.chances = {1: [0.9] * 6}
    proposer, random = auto(plan=asdict(made), beams=[1]).proposer(), torch.Generator().manual_seed(0)
    for _ in range(500):
        levels = proposer.propose(draft, None)
        accepted = int((torch.rand(levels, generator=random) < 0.3).cumprod(dim=0).sum())
        proposer.learn(stood(accepted, levels))
    # at 0.3 a level the second adds 0.09 tokens for 0.3 of a second, in which a round brings 0.3
    assert [levels for _, levels in proposer.shapes[-20:]] == [1] * 20


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("confident", [True, False])
def test_the_shapes_on_record_are_what_was_drafted(golden_target, golden_draft, confident, temperature):
    """Whether the draft is asked on the way or not; and what is said is what the target says to fixed chains."""
    draft, drafted = golden_draft("eagle3_e2e"), []

    def noting(propose, beams):
        def proposing(*shape):
            proposal = propose(*shape)
            depth = len(proposal.tokens) if proposal.tree is None else int(proposal.tree.depths.max())
            drafted.append((beams, depth))
            return proposal

        return proposing

    draft.propose, draft.propose_tree = noting(draft.propose, 1), noting(draft.propose_tree, 4)
    sampling = {"max_new_tokens": 60, "temperature": temperature}
    made = respond_with(golden_target, draft, FIXED.build(None, 0), shape=auto, confident=confident, **sampling)
    fixed = respond_with(golden_target, golden_draft("eagle3_e2e"), FIXED.build(None, 0), shape=chain, **sampling)
    assert made.tokens == fixed.tokens
    assert len(made.shapes) == made.rounds == len(drafted)
    for (beams, levels), (kind, depth) in zip(made.shapes, drafted, strict=True):
        assert beams == kind
        # the best 15 nodes need not reach the last level that was drafted
        assert depth == levels if beams == 1 else 1 <= depth <= levels
    assert {beams for beams, _ in made.shapes} == {1, 4}


def test_fixed_shapes_are_not_recorded(golden_target, golden_draft):
    assert respond_with(golden_target, golden_draft("eagle3_e2e"), FIXED.build(None, 0)).shapes is None


# Plans


def test_a_plan_is_measured_once_a_machine_and_pair(tmp_path, monkeypatch):
    served = tiny("float32")
    draft = lens(served.target, 200)
    spec = auto(plan=None, widths=[8, 16], cache=str(tmp_path))
    first = planned(spec, served, draft, "a", Meter(CPU))
    made = Plan.read(first.plan)
    assert made.width in (8, 16)
    assert [way.beams for way in made.ways] == [1, 4]
    assert all(len(way.seconds) == len(way.survival) == 6 for way in made.ways)
    assert all(way.seconds[0] > 0 and way.seconds == sorted(way.seconds) for way in made.ways)
    assert all(0 < share < 1 for way in made.ways for share in way.survival)
    monkeypatch.setattr("tracedraft.calibrate.measured", lambda *_: pytest.fail("measured again"))
    assert planned(spec, served, draft, "a", Meter(CPU)) == first
    assert planned(first, served, draft, "b", Meter(CPU)) is first
    with pytest.raises(pytest.fail.Exception):
        planned(spec, served, draft, "b", Meter(CPU))


def test_no_level_is_planned_that_a_pass_cannot_verify(tmp_path):
    """Eight tokens of a pass are the root and seven others: an eighth level would look free."""
    served = tiny("float32")
    spec = auto(plan=None, widths=[8], most_levels=8, beams=[1], cache=str(tmp_path), max_new_tokens=16)
    (way,) = measured(spec, served, lens(served.target, 200), Meter(CPU)).ways
    assert len(way.seconds) == len(way.survival) == 7


def test_what_a_shape_takes_once_is_in_no_level(monkeypatch):
    """As the capture of a graph does: it would lift every deeper level that costs less."""
    seen = set()

    def answers(shape, *_):
        (beams,), levels = shape.beams, shape.most_levels
        seconds = 1 + 0.1 * levels if beams in seen else 100.0
        seen.add(beams)
        return [SimpleNamespace(seconds={"prefill": 7.0, "verify": seconds}, rounds=1, trials=[], survivals=[])]

    monkeypatch.setattr("tracedraft.calibrate._answers", answers)
    made = measured(auto(plan=None, widths=[16]), None, None, None)
    for way in made.ways:
        assert way.seconds == pytest.approx([1 + 0.1 * levels for levels in range(1, 7)])


def test_a_round_costs_what_a_line_through_medians_says(monkeypatch):
    """One level, which is cheap where nothing else is drafted, is not asked; one disturbed answer moves nothing."""
    asked = []

    def answers(shape, *_):
        levels = shape.most_levels
        asked.append(levels)
        seconds = {1: 0.5, 2: 1.2, 3: 1.3, 6: 1.6}[levels] * (9 if len(asked) == 2 else 1)
        return [SimpleNamespace(seconds={"prefill": 7.0, "verify": seconds}, rounds=1, trials=[], survivals=[])]

    monkeypatch.setattr("tracedraft.calibrate._answers", answers)
    (way,) = measured(auto(plan=None, widths=[16], beams=[1]), None, None, None).ways
    assert asked == [1, *3 * [2, 3, 6]]
    assert way.seconds == pytest.approx([1.1, 1.2, 1.3, 1.4, 1.5, 1.6])


@pytest.mark.parametrize(
    ("seconds", "line"),
    [({1: 2.0}, [2.0]), ({1: 2.0, 2: 2.5}, [2.0, 2.5]), ({2: 2.0, 3: 1.0}, [1.5, 1.5, 1.5]),
     ({2: 1.0, 3: 4.0}, [1.0, 2.0, 3.0])],
)  # fmt: skip
def test_no_level_and_no_round_is_taken_to_cost_less_than_nothing(seconds, line):
    """Where noise was measured."""
    assert _line(seconds, len(line)) == pytest.approx(line)


@pytest.mark.parametrize(("most", "timed"), [(1, [1]), (2, [1, 2]), (3, [2, 3]), (6, [2, 3, 6])])
def test_two_depths_are_timed_where_there_are_two(monkeypatch, most, timed):
    """Of one alone each further level would look free."""
    asked = []

    def answers(shape, *_):
        asked.append(shape.most_levels)
        seconds = {"prefill": 0.0, "verify": 1 + 0.1 * shape.most_levels}
        return [SimpleNamespace(seconds=seconds, rounds=1, trials=[], survivals=[])]

    monkeypatch.setattr("tracedraft.calibrate._answers", answers)
    (way,) = measured(auto(plan=None, widths=[16], beams=[1], most_levels=most), None, None, None).ways
    assert asked == [1, *3 * timed]
    assert way.seconds == pytest.approx([1 + 0.1 * levels for levels in range(1, most + 1)])


def test_workers_that_start_together_measure_once(tmp_path, monkeypatch):
    served, spec, made = tiny("float32"), auto(plan=None, cache=str(tmp_path)), []

    def slowly(*_) -> Plan:
        made.append(1)
        time.sleep(0.2)  # for the others to come
        return plan(beams=(1, 4))

    monkeypatch.setattr("tracedraft.calibrate.measured", slowly)
    with ThreadPoolExecutor(4) as pool:
        each = list(pool.map(lambda _: planned(spec, served, None, "a", Meter(CPU)), range(4)))
    assert len(made) == 1
    assert all(one == each[0] for one in each)


def test_the_width_of_the_best_rate_is_chosen(monkeypatch):
    plans = {8: plan(verify=2.0), 16: plan(verify=1.0), 24: plan(verify=3.0)}
    monkeypatch.setattr("tracedraft.calibrate._plan", lambda _, width, *__: plans[width])
    assert measured(auto(plan=None, widths=[8, 16, 24]), None, None, None) is plans[16]


def test_plans_survive_json():
    made = plan(beams=(1, 6))
    assert Plan.read(json.loads(json.dumps(asdict(made)))) == made


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"beams": []}, "beams"), ({"beams": [1, 1]}, "beams"), ({"widths": [12]}, "widths"), ({"widths": []}, "widths"),
     ({"probe_every": 1}, "probe_every"), ({"most_levels": 0}, "most_levels"), ({"acceptance": "rejection"}, "exact"),
     ({"beams": [1]}, "plan.*null"), ({"widths": [8]}, "plan.*widths"), ({"most_levels": 5}, "plan.*most_levels"),
     ({"plan": {"width": 8}}, "plan: not a plan"),
     ({"plan": {"width": 8, "ways": []}}, "plan.*beams"),
     ({"plan": {"width": 8, "ways": [{"beams": 1, "seconds": [1.0], "survival": [0.0]}]}}, "survival: expected")],
)  # fmt: skip
def test_bad_settings_are_named(changes, words):
    with pytest.raises(UserError, match=rf"^decode\..*{words}"):
        auto(**changes)


# Runs


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run, its folder, and the summary."""
    folder = tmp_path_factory.mktemp("auto")
    cfg = composed(*RUN, f"paths.cache={folder / 'cache'}")
    return cfg, folder / "run", measure.measure(cfg, folder / "run", None)


def test_a_run_records_its_plan_and_every_decision(done):
    _, folder, summary = done
    assert summary["lossless"] is True
    assert summary["provenance"]["plan"] == read_attempts(folder)[0]["plan"]
    for name in ("fixed", "adapted"):
        for response in arms(conversations(folder), name):
            assert len(response["shapes"]) == response["rounds"]


def test_replaying_the_plan_on_record_gives_the_same_counts(tmp_path, done):
    """Contract 5: nothing but the plan came from the clock."""
    _, folder, summary = done
    cfg = composed(*RUN, f"paths.cache={tmp_path}")
    cfg.decode.plan = summary["provenance"]["plan"]
    measure.measure(cfg, tmp_path / "run", None)
    assert untimed(tmp_path / "run") == untimed(folder)
    other = composed(*RUN, f"paths.cache={tmp_path}")
    other.decode.plan = summary["provenance"]["plan"]
    for way in other.decode.plan.ways:
        way.seconds = [1.0 + 10.0 * levels for levels in range(len(way.seconds))]  # no further level pays
    measure.measure(other, tmp_path / "other", None)
    shapes = [shape for r in arms(conversations(tmp_path / "other"), "fixed") for shape in r["shapes"]]
    assert {levels for _, levels in shapes} == {1}


def test_a_run_that_goes_on_keeps_the_plan_it_began_with(tmp_path, done, monkeypatch):
    cfg, folder, _ = done
    monkeypatch.setattr(measure, "planned", lambda spec, *_: spec)  # whatever a machine says now
    half = tmp_path / "run"
    half.mkdir()
    for name in ("config.yaml", "attempts.jsonl"):
        (half / name).write_bytes((folder / name).read_bytes())
    lines = (folder / "conversations.jsonl").read_bytes().splitlines(keepends=True)
    (half / "conversations.jsonl").write_bytes(lines[0])
    measure.measure(cfg, half, None)
    assert untimed(half) == untimed(folder)


def test_eval_draft_measures_it_too(tmp_path):
    cfg = composed("decode=auto", f"paths.cache={tmp_path}", "+temperatures=[0.0]", "workload.limit=1")
    result = evaluate_draft(cfg, tmp_path / "run")
    assert result["rows"][0]["tau"] >= 1
