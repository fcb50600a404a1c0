"""What learning costs, from counts and shapes worked out by hand, and how many conversations a gain needs."""

from __future__ import annotations

import dataclasses

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tests.table_cases import at, run, runs
from tracedraft.analysis import costs, shapes
from tracedraft.analysis.pooling import chosen
from tracedraft.config import shipped_dir


def test_costs_are_shares_of_time_and_shapes_times_counts():
    row = at(costs.cost_table(runs(run())), "smollm2-135m", "0.7", "reset")
    assert row["share of the adapted arm's time: verify"].value == pytest.approx(0.5)
    shape = shapes.SHAPES["smollm2-135m"]
    # SmolLM2-135M has 134.5 million weights, its tied embedding counted once.
    assert shape.target_pass == pytest.approx(134.5e6, rel=0.01)
    assert shapes.SHAPES["llama3.1-8b"].target_pass == pytest.approx(8.03e9 - 128256 * 4096, rel=0.01)
    plain = shapes.Work(rounds=1.0, updates=0.0, positions=0.0)
    draft = shape.draft_slot + shape.draft_head
    assert shapes.arithmetic(shape, CHAIN, SGD, plain) == 2 * (2 * shape.target_pass + draft)
    learning = dataclasses.replace(plain, updates=0.1, positions=64)
    assert added(shapes.arithmetic, SGD, learning) == pytest.approx(0.1 * 4 * 64 * shape.draft_head)
    assert shapes.arithmetic(shape, {"most_levels": 8}, SGD, plain) is None


CHAIN = {"chain_length": 1}
SGD = {"optimizer": "sgd", "form": "dense", "window": 64, "max_rows": 256}


def added(of, adapter, work, *size):
    """By learning, to what a token needs."""
    shape = shapes.SHAPES["smollm2-135m"]
    idle = dataclasses.replace(work, updates=0.0, training=shapes.Training())
    return of(shape, CHAIN, adapter, work, *size) - of(shape, CHAIN, adapter, idle, *size)


def test_an_update_moves_what_its_form_and_its_optimiser_hold():
    """In bf16 SGD reads the head, sweeps an fp32 master and publishes; Adam has moments, a low rank only rows."""
    head, row, once = 576 * 12288, 576 + 12288, shapes.Work(rounds=1.0, updates=1.0, positions=64)
    dense = added(shapes.traffic, SGD, once, 2)
    assert dense == pytest.approx((2 + 4 + 4 + 2) * head)
    assert added(shapes.traffic, SGD | {"optimizer": "adam"}, once, 2) == pytest.approx(dense + 3 * 8 * head)
    low = SGD | {"form": "lowrank"}
    assert added(shapes.traffic, low, once, 2) == pytest.approx(2 * head + 64 * (4 + 4 + 2) * row)
    idle = dataclasses.replace(once, updates=0.0)
    shape = shapes.SHAPES["smollm2-135m"]
    rows = shapes.traffic(shape, CHAIN, low, idle, 2) - shapes.traffic(shape, CHAIN, SGD, idle, 2)
    assert rows == 2 * 256 * row  # which each drafted token reads


def test_learning_between_requests_counts_from_its_blocks():
    """Blocks of two conversations, all of 12 of them: 6 blocks, each gone through three times in whole."""
    block = {"block": 1, "loss": 2.0, "seconds": 0.5, "committed": True, "steps": 3, "lessons": 2, "predictions": 100}
    outer = {"outer": {"lr": 1e-4, "optimizer": "adamw", "objective": "all", "unroll": 2, "batch": None}}
    learner = run("gsm8k", "osd", outer=[None, block] * 6, settings=outer)
    without = run("gsm8k", "osd", settings=outer)
    tokens = sum(row["arms"]["adapted"]["tokens"] for row in learner.rows)
    with_it, alone = (at(costs.cost_table(runs(each)), "0.7", "osd") for each in (learner, without))
    shape = shapes.SHAPES["smollm2-135m"]
    draft, teacher = shape.draft_slot + shape.draft_head, 576 * 49152
    operations = 6 * 3 * 100 * 2 * (3 * draft + teacher / 2)
    moved = 6 * 3 * (2 * (16 * draft + 2 * teacher) + (4 * 7 + 2) * draft)
    for column, more in (("MFLOP a token", operations), ("MB moved a token", moved)):
        name = f"from shapes: {column}"
        assert 1e6 * (with_it[name].value - alone[name].value) * tokens == pytest.approx(more)


def test_caches_of_both_decoders_are_shown():
    row = at(costs.cost_table(runs(run())), "0.7", "reset")
    # 31 layers of keys and values, three heads of 64, in bf16.
    assert row["memory from shapes: KV cache of 1,024 tokens"].value == 1024 * 31 * 2 * 3 * 64 * 2


def test_memory_counts_copies_of_what_is_trained():
    shape = shapes.SHAPES["smollm2-135m"]
    head = 576 * 12288
    weights, learner = shapes.memory(shape, 2, SGD)
    assert weights == 2 * (shape.target_pass + shape.draft_slot + head)
    assert learner == 64 * 4 * (576 + 12288) + (4 + 2) * head  # window, fp32 master and the start in bf16
    assert shapes.memory(shape, 2, SGD | {"optimizer": "adam"})[1] == learner + 3 * 4 * head
    with initialize_config_dir(str(shipped_dir("conf")), version_base="1.3"):
        ensemble = OmegaConf.to_container(compose("config", ["adapter=ensemble"]).adapter, resolve=True)
    # Three copies, and twice for each of three learners weights and two moments; and what is served, and gradients.
    assert shapes.memory(shape, 2, ensemble)[1] == 4 * (3 + 2 * 3 * 3 + 2) * (shape.draft_slot + head)
    assert shapes.memory(shape, 2, {"name": "unknown"})[1] is None


def test_power_needs_fewer_conversations_for_larger_gains():
    row = at(costs.power_table(runs(run())), "aime24", "0.7", "reset")
    counts = [row[f"speedup: +{g} %"].value for g in (1, 2, 5, 10)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def test_negative_controls_and_other_settings_have_a_noise_of_their_own():
    real = {"outer": {"lr": 1e-4, "fault": "none"}}
    wrong, other = ({"outer": real["outer"] | change} for change in ({"fault": "wrong_shift"}, {"lr": 1e-3}))
    data = runs(*(run("gsm8k", "osd", settings=settings) for settings in (real, wrong, other)))
    table = costs.power_table(data)
    assert [row.labels[-1] for row in table.rows] == ["osd lr=0.0001", "osd lr=0.001"]
    assert {row.cells[0].n for row in table.rows} == {12}
    shown = [config["adapter"]["outer"] for config in chosen(data).runs["config"]]
    assert shown == [real["outer"], other["outer"]]
    assert [why for _, why in chosen(data).left_out] == ["a negative control"]
    assert len(chosen(data, tuning=True).runs) == 3


def test_long_conversations_have_a_range_without_an_end():
    long = run()
    for row in long.rows[:4]:
        for arm in row["arms"].values():
            arm["tokens"] = 5000
    table = costs.length_table(runs(long))
    assert at(table, "more than 4096")["n, timed"].value == "4, 4"
