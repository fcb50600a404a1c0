"""One run of the tiny pair, from the composed config to its record."""

import hashlib
import json
import types

import pytest
from omegaconf import OmegaConf
from run_cases import CHAT, SAMPLED, arms, composed, conversations, prompts_file, untimed

from tracedraft import chat
from tracedraft import measure as measuring
from tracedraft import target as target_module
from tracedraft.adapters.fixed import FixedAdapter
from tracedraft.config import ASSETS, build_spec, fingerprint
from tracedraft.errors import UserError
from tracedraft.identity import GROUPS
from tracedraft.measure import measure
from tracedraft.records import ATTEMPTS, CONFIG, CONVERSATIONS, SUMMARY
from tracedraft.types import Response


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run over two conversations of two turns: its config, folder and returned summary."""
    folder = tmp_path_factory.mktemp("runs") / "done"
    cfg = composed(*CHAT, *SAMPLED)
    return cfg, folder, measure(cfg, folder, None)


# --- what a run leaves


def test_the_folder_holds_config_records_and_summary(done):
    cfg, folder, returned = done
    assert sorted(path.name for path in folder.iterdir()) == sorted((ATTEMPTS, CONFIG, CONVERSATIONS, SUMMARY))
    text = (folder / CONFIG).read_text()
    assert "${" not in text
    assert OmegaConf.to_container(OmegaConf.create(text)) == OmegaConf.to_container(cfg, resolve=True)
    records = conversations(folder)
    assert [record["index"] for record in records] == [0, 1]
    for record in records:
        assert [turn["arms"].keys() for turn in record["turns"]] == [{"fixed", "adapted"}] * 2
    assert json.loads((folder / SUMMARY).read_text()) == returned | {"wandb_error": None}


def test_the_summary_says_where_the_run_comes_from(done):
    cfg, _, summary = done
    names = {
        "target": "tiny",
        "draft": "tiny",
        "adapter": "persistent",
        "workload": "sample_chat",
        "decode": "chain",
    }
    assert {key: summary[key] for key in names} == names
    origin = summary["provenance"]
    specs = {group: build_spec(cfg[group], group) for group in GROUPS}
    contents = {"target": None, "draft": None, "workload": origin["data"]["sha256"]}
    assert origin["fingerprint"] == fingerprint({**specs, "seed": 0, "plain": False, "measure": "time"}, contents)
    shipped = (ASSETS / "workloads" / "sample_chat.jsonl").read_bytes()
    assert origin["data"]["sha256"] == hashlib.sha256(shipped).hexdigest()
    assert all(origin["versions"][name] for name in ("python", "torch", "tracedraft"))
    assert origin["torch_threads"] >= 1
    assert origin["target_weights"]["origin"] == "random, seed 0"
    assert origin["draft_weights"]["origin"] == "untrained"


@pytest.mark.parametrize("name", ["fixed", "adapted"])
def test_the_summary_follows_from_the_records(done, name):
    _, folder, summary = done
    responses = arms(conversations(folder), name)
    found = summary if name == "adapted" else summary["fixed"]
    rounds, accepted = sum(r["rounds"] for r in responses), sum(r["accepted"] for r in responses)
    tokens = sum(len(r["tokens"]) for r in responses)
    seconds = sum(sum(r["seconds"].values()) for r in responses)
    assert rounds > 0
    assert tokens == len(responses) + accepted + rounds - sum(r["cut"] for r in responses)
    assert (found["rounds"], found["accepted"], found["tokens"]) == (rounds, accepted, tokens)
    assert found["tau"] == pytest.approx((accepted + rounds) / rounds)
    assert found["tokens_per_s"] == pytest.approx(tokens / seconds)
    assert found["updates"]["attempted"] == sum(len(r["updates"]) for r in responses)


def test_the_speedup_is_of_times_over_the_same_tokens(done):
    _, folder, summary = done
    records = conversations(folder)
    seconds = {name: sum(sum(r["seconds"].values()) for r in arms(records, name)) for name in ("fixed", "adapted")}
    assert [r["tokens"] for r in arms(records, "fixed")] == [r["tokens"] for r in arms(records, "adapted")]
    assert summary["speedup"] == pytest.approx(seconds["fixed"] / seconds["adapted"])
    assert summary["updates"]["committed"] > 0
    assert summary["fixed"]["updates"]["attempted"] == 0


# --- lossless


def test_sampled_answers_are_audited_and_lossless(done):
    _, folder, summary = done
    tokens = {tuple(r["tokens"]) for r in arms(conversations(folder), "adapted")}
    assert (summary["lossless"], summary["mismatches"]) == (True, 0)
    assert summary["audited"] == summary["tokens"] == sum(map(len, tokens))
    assert len(tokens) > 1  # not one answer over and over


@pytest.mark.parametrize("wrong", [("fixed", "adapted"), ("adapted",)])
def test_an_answer_that_is_not_the_targets_is_found_out(tmp_path, monkeypatch, wrong):
    right = measuring.respond

    def tampered(target, draft, adapter, prompt, *rest):
        answer = right(target, draft, adapter, prompt, *rest)
        if ("fixed" if isinstance(adapter, FixedAdapter) else "adapted") in wrong:
            answer.tokens[3] = (answer.tokens[3] + 1) % 200
        return answer

    monkeypatch.setattr(measuring, "respond", tampered)
    summary = measure(composed("workload.limit=1"), tmp_path / "run", None)
    assert summary["lossless"] is False
    assert summary["mismatches"] >= 1
    assert summary["arms_differ"] == (len(wrong) == 1)


# --- order, turns and refusals


def served(monkeypatch) -> list[tuple[str, list[int], Response]]:
    """Every answer from now on: arm, prompt, answer; warm-up answers left out."""
    calls, right = [], measuring.respond

    def noted(target, draft, adapter, prompt, *rest):
        answer = right(target, draft, adapter, prompt, *rest)
        calls.append(("fixed" if isinstance(adapter, FixedAdapter) else "adapted", prompt, answer))
        return answer

    def no_warm_up(*_):
        pass

    monkeypatch.setattr(measuring, "respond", noted)
    monkeypatch.setattr(measuring, "warm_up", no_warm_up)
    return calls


def test_arms_alternate_and_the_record_says_how(tmp_path, monkeypatch):
    calls = served(monkeypatch)
    measure(composed("workload=sample_chat", "workload.limit=3"), tmp_path / "run", None)
    one, other = ["fixed", "adapted"], ["adapted", "fixed"]
    assert [arm for arm, _, _ in calls] == (one * 2) + (other * 2) + (one * 2)
    assert [record["order"] for record in conversations(tmp_path / "run")] == [one, other, one]


def test_a_second_turn_continues_the_first(tmp_path, monkeypatch):
    calls = served(monkeypatch)
    cfg = composed(*prompts_file(tmp_path, ("Who?", "Why?")))
    measure(cfg, tmp_path / "run", None)
    tokenizer = build_spec(cfg.target, "target").build().tokenizer
    (record,) = conversations(tmp_path / "run")
    for arm in ("fixed", "adapted"):
        (first, answer), (second, _) = [(prompt, answer) for name, prompt, answer in calls if name == arm]
        text = tokenizer.decode(answer.tokens, skip_special_tokens=True)
        assert text == record["turns"][0]["text"] != ""
        said = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert second[: len(first) + len(said)] == first + said
        assert tokenizer.decode(second[len(first) + len(said) :]).count("Why?") == 1
    assert [turn["prompt_tokens"] for turn in record["turns"]] == [len(first), len(second)]


def test_max_turns_cuts_conversations(tmp_path, done):
    measure(composed(*CHAT, *SAMPLED, "workload.max_turns=1"), tmp_path / "run", None)
    cut, whole = conversations(tmp_path / "run"), conversations(done[1])
    assert [len(record["turns"]) for record in cut] == [1] * 2
    firsts = [record["turns"][0]["arms"]["fixed"]["tokens"] for record in whole]
    assert [record["turns"][0]["arms"]["fixed"]["tokens"] for record in cut] == firsts


@pytest.mark.parametrize("place", [0, 1])
def test_a_prompt_over_the_context_is_refused_by_name_and_the_others_go_on(tmp_path, capfd, place):
    questions = [("Who?",), ("Where?",)]
    questions.insert(place, ("long " * 100,))
    cfg = composed(*prompts_file(tmp_path, *questions), "target.context=200")
    summary = measure(cfg, tmp_path / "run", None)
    records = conversations(tmp_path / "run")
    assert summary["refused"] == {"count": 1, "ids": [f"q/{place}"]}
    assert (summary["conversations"], summary["turns"]) == (3, 2)
    assert [len(record["turns"]) for record in records] == [int(i != place) for i in range(3)]
    (refused,) = [record["refused"] for record in records if record["refused"]]
    assert (refused["turn"], refused["context"], refused["tokens"] > 500) == (0, 200, True)
    assert f"refused q/{place}: turn 0 has {refused['tokens']} tokens" in capfd.readouterr().err


def test_a_later_turn_over_the_context_keeps_the_earlier_ones(tmp_path):
    cfg = composed(*prompts_file(tmp_path, ("Who?", "long " * 100, "Why?"), ("Who?",)), "target.context=200")
    measure(cfg, tmp_path / "run", None)
    first, second = conversations(tmp_path / "run")
    assert len(first["turns"]) == len(second["turns"]) == 1
    assert first["refused"]["turn"] == 1
    assert second["refused"] is None


def test_the_context_is_used_to_its_last_token(tmp_path):
    question = prompts_file(tmp_path, ("Who?",))
    measure(composed(*question), tmp_path / "roomy", None)
    (turn,) = conversations(tmp_path / "roomy")[0]["turns"]
    length = turn["prompt_tokens"]
    measure(composed(*question, f"target.context={length + 1}"), tmp_path / "one", None)
    (one,) = conversations(tmp_path / "one")[0]["turns"]
    assert one["arms"]["fixed"]["tokens"] == turn["arms"]["fixed"]["tokens"][:1]
    assert one["arms"]["fixed"]["ended"] == "context"
    summary = measure(composed(*question, f"target.context={length}"), tmp_path / "none", None)
    assert summary["refused"]["count"] == 1
    assert summary["tau"] is summary["speedup"] is summary["lossless"] is None
    assert summary["null_reasons"].keys() >= {"tau", "speedup", "lossless"}


# --- the same again


def test_a_run_repeats_itself_cold_and_warm(tmp_path, done):
    measuring._LOADED.clear()
    measure(composed(*CHAT, *SAMPLED), tmp_path / "cold", None)
    measure(composed("adapter=reset", "adapter.every=2", "seed=5", "target.seed=1"), tmp_path / "other", None)
    measure(composed("adapter=reset", "adapter.every=2", "seed=5"), tmp_path / "warm other", None)
    measure(composed(*CHAT, *SAMPLED), tmp_path / "warm", None)
    assert untimed(tmp_path / "cold") == untimed(tmp_path / "warm") == untimed(done[1])
    assert untimed(tmp_path / "other") != untimed(tmp_path / "warm other")  # another target was really served


def test_the_seed_and_the_arms_noise(tmp_path, done):
    """Another seed samples other answers; another adapter or draft serves the very same ones."""
    other = ("adapter=reset", "draft.draft_vocab_size=100", "draft.seed=3")
    for name, overrides in {"seed": ("seed=1",), "learner": other}.items():
        measure(composed(*CHAT, *SAMPLED, "adapter.every=4", *overrides), tmp_path / name, None)
    answers = {
        folder.name: [r["tokens"] for r in arms(conversations(folder), "adapted")]
        for folder in (done[1], tmp_path / "seed", tmp_path / "learner")
    }
    assert answers["seed"] != answers["done"] == answers["learner"]


@pytest.mark.parametrize(("adapter", "independent"), [("reset", True), ("persistent", False)])
def test_reset_forgets_between_conversations_and_persistent_does_not(tmp_path, adapter, independent):
    learner = (f"adapter={adapter}", "adapter.every=4", "adapter.drift_cap=null", "adapter.lr=0.3")
    losses = {}
    for name, questions in {"both": (("Who?",), ("Where?",)), "second": (("Where?",),)}.items():
        (folder := tmp_path / name).mkdir()
        measure(composed(*prompts_file(folder, *questions), *learner), folder / "run", None)
        updates = arms(conversations(folder / "run"), "adapted")[-1]["updates"]
        losses[name] = [update["loss"] for update in updates if update["committed"]]
        assert losses[name]
    assert (losses["both"] == losses["second"]) is independent


def test_a_folder_that_holds_a_run_is_refused_and_left_alone(tmp_path):
    measure(composed("workload.limit=1"), tmp_path / "run", None)
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(UserError, match=r"already holds another run.*seed=0, now 1\).*hydra\.run\.dir"):
        measure(composed("workload.limit=1", "seed=1"), tmp_path / "run", None)
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


# --- what goes wrong


def test_a_cache_that_cannot_fit_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    memory = types.SimpleNamespace(virtual_memory=lambda: types.SimpleNamespace(available=1000))
    monkeypatch.setattr(target_module, "psutil", memory)
    with pytest.raises(UserError, match=r"KV cache.*decode\.max_new_tokens"):
        measure(composed(), tmp_path / "run", None)
    assert not (tmp_path / "run").exists()


def test_memory_counts_every_turn_in_its_template_and_the_drafts(tmp_path, monkeypatch):
    """Two questions of two turns: the longest prompt that is served, an answer at its limit in it, is the bound."""
    counted = []
    monkeypatch.setattr(target_module.LlamaTarget, "check_memory", lambda _, *given: counted.append(given))
    bucket = ("decode.cache_bucket=1", "decode.prefill_chunk=1", "decode.chain_length=7")
    cfg = composed(*prompts_file(tmp_path, ("Who?", "Why?"), ("Where?", "When then?")), *bucket)
    tokenizer = build_spec(cfg.target, "target").build().tokenizer
    measure(cfg, tmp_path / "run", None)
    history = [("user", "Where?"), ("assistant", "."), ("user", "When then?")]
    prompt = chat.encode(tokenizer, [{"role": role, "content": text} for role, text in history])
    draft = 2 * 2 * 8 * 4  # keys and values, of two heads of eight floats
    both = 2 * draft
    measure(composed(*prompts_file(tmp_path, ("Where?",)), *bucket), tmp_path / "single", None)
    single = len(chat.encode(tokenizer, [{"role": "user", "content": "Where?"}]))
    # the cache of the response in progress, and those of each arm's last turn
    assert counted == [(len(prompt) + 20 + 20 + 8, 3, 2 * both), (single + 20 + 8, 1, both)]


@pytest.mark.parametrize(
    "bad", ["seed=abc", "seed=-1", "seed=1.5", "seed=null", "threads=0", "threads=two", "wandb.mode=dryrun"]
)
def test_bad_settings_outside_the_groups_are_named_before_anything_is_written(tmp_path, bad):
    key, _, value = bad.partition("=")
    with pytest.raises(UserError, match=rf"^{key}='?({value}|None)'?: expected "):
        measure(composed(bad), tmp_path / "run", None)
    assert not (tmp_path / "run").exists()
