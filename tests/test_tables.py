"""Tables of runs whose gains are known: what a cell pools, what is missing or refused, and the files written."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import shutil
import subprocess

import pandas as pd
import pytest

from tests.table_cases import at, run, runs
from tracedraft import statistics
from tracedraft.analysis import costs, paper, related, tuning
from tracedraft.analysis.check import findings
from tracedraft.analysis.pooling import Pools, chosen, over, speedup, tau_gain
from tracedraft.analysis.rendering import as_csv, as_latex, as_markdown, latex_escape, write
from tracedraft.analysis.tables import Cell, Column, Missing, Refused, Row, Table, finished
from tracedraft.errors import UserError
from tracedraft.workloads.prompts import is_dev


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 1999)


def eight(*more):
    """Reset in one order, Persistent in three, at both temperatures, on two of the eight workloads."""
    return runs(*more, *(
        run(workload, adapter, temperature=temperature, order=order)
        for workload in ("aime24", "mtbench")
        for temperature in (0.7, 0.0)
        for adapter, orders in (("reset", [0]), ("persistent", [0, 1, 2]))
        for order in orders
    ))  # fmt: skip


def test_eight_workloads_recover_the_gains_that_went_in():
    table = finished(paper.eight_workloads(eight()))
    row = at(table, "aime24", "0.7")
    for adapter in ("reset", "persistent"):
        gain, ratio = row[f"gain in tau: {adapter}"], row[f"speedup over fixed: {adapter}"]
        assert gain.value == pytest.approx(1.1, abs=0.01)
        assert ratio.value == pytest.approx(1.05, abs=0.02)
        assert ratio.low < ratio.value < ratio.high
        assert gain.significant
    assert row["n, timed"].value == "12, 12 / 36, 36"
    assert row["repeated 8-grams"].value == pytest.approx(0.1, abs=0.02)


def test_means_say_how_many_workloads_they_hold_and_missing_ones_show():
    table = finished(paper.eight_workloads(eight()))
    for adapter in ("reset", "persistent"):
        both = [at(table, name, "0.7")[f"gain in tau: {adapter}"].value for name in ("aime24", "mtbench")]
        mean = at(table, "mean of the eight (2 of 8)", "0.7")[f"gain in tau: {adapter}"]
        assert mean.value == pytest.approx(sum(both) / 2)
    assert (
        at(table, "mean of long outputs (1 of 7)", "0")["tau: fixed"].value
        == at(table, "aime24", "0")["tau: fixed"].value
    )
    missing = at(table, "aime25", "0.7")["gain in tau: reset"]
    assert (missing.value, missing.n, missing.reason) == (None, 0, "no conversation")


def test_the_macro_tau_weighs_conversations_alike():
    one = run(n=3, gain=1.0)
    for row, (accepted, rounds) in zip(one.rows, ((0, 10), (10, 10), (300, 100)), strict=True):
        row["arms"]["adapted"] |= {"accepted": accepted, "rounds": rounds}
    row = at(paper.eight_workloads(runs(one)), "aime24", "0.7")
    assert row["macro tau: reset"].value == pytest.approx((1 + 2 + 4) / 3)
    assert row["tau: reset"].value == pytest.approx(430 / 120)


def test_throughput_comes_from_timed_runs_only_and_repetitions_count_once():
    """The same run for acceptance adds its other conversations to tau, and nothing to seconds."""
    table = paper.eight_workloads(
        runs(run(n=10), run(n=10, measure="acceptance"), run(n=10, seed=1, measure="acceptance"))
    )
    row = at(table, "aime24", "0.7")
    assert row["n, timed"].value.startswith("20, 10")
    assert row["speedup over fixed: reset"].n == 10
    assert row["gain in tau: reset"].n == 20


def test_too_few_orders_give_an_interval_that_says_so_and_no_test():
    pools = Pools(runs(run(adapter="persistent"), run(adapter="persistent", order=1)))
    found = tau_gain(pools.of(adapter="persistent"))
    assert found.low is not None
    assert (found.p, found.reason) == (None, "2 of 3 orders of the stream")
    table = finished(paper.eight_workloads(runs(run(adapter="persistent"))))
    assert "°" in as_markdown(table)
    assert not any(cell.significant for _, _, cell in table.cells())


def test_a_combination_is_compared_with_its_own_baseline():
    """osd gains 1.1 over fixed and osd_reset 1.21: 1.1 over osd; the machine was twice as slow in one of the runs."""
    slow = run("gsm8k", "osd_reset", experiment="combination", gain=1.21, speedup=1.2)
    for row in slow.rows:
        for arm in row["arms"].values():
            arm["seconds"] = {phase: 2 * s for phase, s in arm["seconds"].items()}
    data = runs(run("gsm8k", "osd", experiment="combination", gain=1.1, speedup=1.0), slow)
    row = at(paper.combinations(data), "gsm8k", "0.7", "osd")
    assert row["gain in tau over alone: + reset"].value == pytest.approx(1.1, abs=0.03)
    assert row["speedup: + reset over alone"].value == pytest.approx(1.2, abs=0.03)
    assert row["tau: + persistent"].value is None
    pools = Pools(data)
    assert over(pools.of(adapter="osd_reset"), pools.of(adapter="osd"), seconds=True).n == 12


def test_streams_are_cut_where_the_first_other_domain_begins():
    halves = ["a"] * 7 + ["b"] * 5
    sharp = run("stream_sharp", "persistent", experiment="cross_domain", domains=halves, switches=[7])
    for row in sharp.rows[:7]:
        row["arms"]["adapted"] = row["arms"]["fixed"]
    mixed = run("stream_mixed", "persistent", experiment="cross_domain", domains=["a", "b"] * 6)
    table = finished(paper.cross_domain(runs(sharp, mixed)))
    row = at(table, "stream_sharp", "0.7", "persistent")
    assert row["switch at"].value == "7"
    assert row["after the switch: gain"].value == pytest.approx(1.1, abs=0.01)
    assert 1.02 < row["full stream: gain"].value < 1.07
    assert row["after the switch: gain"].n == 5
    assert at(table, "stream_mixed", "0.7", "persistent")["switch at"].value == "—"
    assert at(table, "stream_mixed", "0.7", "persistent")["after the switch: gain"].value is None


def test_runs_of_other_settings_are_never_pooled():
    data = runs(run(order=0), run(order=1, settings={"lr": 0.1}))
    with pytest.raises(UserError, match=r"adapter.lr=0.03, 0.1: runs of aime24 at .*adapters reset;.* DIR="):
        paper.eight_workloads(data)
    with pytest.raises(UserError, match=r"decode.max_new_tokens=256, 64: .*adapters persistent, reset"):
        paper.eight_workloads(runs(run(), run(adapter="persistent", tokens=64)))
    table = related.sensitivity(data, "Rates", ["adapter.lr"])
    assert [row.labels[-1] for row in table.rows] == ["0.03", "0.1"]


def test_settings_stand_side_by_side_on_any_prompts():
    dev = {"split": "dev", "experiment": "steps", "measure": "acceptance"}
    made = [run(w, settings={"lr": lr}, gain=1 + lr, **dev) for w in ("arena", "math500") for lr in (0.1, 0.2)]
    table = finished(tuning.settings_table(runs(*made, run("arena", settings={"lr": 0.1}, seed=1, **dev), run())))
    assert [row.labels[-1] for row in table.rows] == ["lr=0.1", "lr=0.2"]
    first, second = (at(table, f"lr={lr}") for lr in (0.1, 0.2))
    assert second["math500: gain"].value == pytest.approx(1.2, abs=0.02)
    assert (first["arena: gain"].n, first["math500: gain"].n) == (24, 12)
    assert second["arena: tau"].best
    assert first["arena: speedup"].value is None


def test_runs_of_development_prompts_unfinished_ones_and_other_experiments_stay_out():
    data = runs(run(), run(order=1, split="dev"), run(order=2, complete=False), run(order=3, experiment="tuning"))
    assert list(chosen(data, "eight_workloads").runs["order"]) == [0]
    assert list(chosen(data).runs["order"]) == [0, 3]
    assert list(chosen(data, "cross_domain").runs["order"]) == [0, 3]


DEV = next(id for id in (f"gsm8k/{i}" for i in range(100)) if is_dev(id))


def holding(*ids, **settings):
    """A run of all prompts, which puts the first ones out for these."""
    found = run("gsm8k", split="all", **settings)
    for row, id in zip(found.rows, ids, strict=False):
        row["id"] = id
    return found


def test_runs_that_hold_development_prompts_stay_out_whatever_they_asked_for():
    """By the rule of the gate, and only a table of settings has them."""
    lost = [("records/eight_workloads.jsonl.gz:gone", "left no record"), ("runs/tuning/away", "left no record")]
    clean, other = holding(), holding(DEV, order=3, experiment="tuning")
    data = runs(clean, holding(DEV, order=1), run("gsm8k", order=2, complete=False), other)
    data = dataclasses.replace(data, problems=[*lost, ("runs/gsm8k_reset_0.7_0_0", "taken from its record")])
    assert list(chosen(data).runs["order"]) == [0]
    assert list(chosen(data, tuning=True).runs["order"]) == [0, 1, 3]
    picked = chosen(data, "eight_workloads")
    assert list(picked.runs["order"]) == [0]
    assert picked.left_out == (
        lost[0],
        ("runs/gsm8k_reset_0.7_0_1", "1 prompts of the development split"),
        ("runs/gsm8k_reset_0.7_0_2", "did not finish"),
    )
    (finding,) = [f for f in findings(data) if f.kind == "split"]
    assert finding.runs == ("gsm8k_reset_0.7_0_1", "gsm8k_reset_0.7_0_3")
    test_only = dataclasses.replace(data, runs=data.runs.assign(test_only=[["gsm8k"]] * 4))
    assert list(chosen(test_only, "eight_workloads").runs["order"]) == [0, 1]
    assert chosen(data, "tuning").runs.empty  # there it is, and no other takes its place
    assert chosen(data, "tuning").left_out[-1][1] == "1 prompts of the development split"


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"hardware": {"cpu": "CPU B", "logical_cores": 4, "gpus": ["H"]}}, "hardware"),
        ({"versions": {"python": "3.12"}}, "versions"),
        ({"mismatches": 1}, "lossless"),
        ({"threads": 1}, "hardware"),
    ],
)
def test_mixtures_are_refused_unless_asked_for_and_then_marked(other, what):
    table = paper.eight_workloads(runs(run(), run("mtbench", **other)))
    with pytest.raises(Refused, match=f"eight_workloads: .* ALLOW={what}"):
        finished(table)
    allowed = finished(table, [what])
    assert len(allowed.warnings) == 1
    assert allowed.warnings[0] in as_markdown(allowed)


@pytest.mark.parametrize("differs", ["hardware", "versions", "threads"])
def test_attempts_at_one_run_that_differ_are_a_mixture(differs):
    values = {"hardware": "CPU A / CPU B", "versions": "python 3 / python 4", "threads": float("nan")}
    data = runs(run())
    mixed = dataclasses.replace(data, runs=data.runs.assign(**{differs: values[differs]}))
    with pytest.raises(Refused, match=f"different {differs}"):
        finished(paper.eight_workloads(mixed))
    everywhere = runs(run(measure="acceptance"), run("mtbench", measure="acceptance", threads=1))
    assert finished(paper.eight_workloads(everywhere)).warnings == ()  # of counts threads are no part


@pytest.mark.parametrize("timed", [True, False])
def test_counts_from_several_machines_are_marked_and_not_refused(timed):
    """Both arms of a run worked on one machine; how long they took is not compared."""
    elsewhere = {"measure": "acceptance", "hardware": {"cpu": "CPU B", "logical_cores": 4, "gpus": []}}
    table = finished(
        paper.eight_workloads(runs(run(measure="time" if timed else "acceptance"), run("mtbench", **elsewhere)))
    )
    (warning,) = table.warnings
    assert re.fullmatch(r"Counts from several machines: .*CPU B.*\.", warning)


def test_other_commits_and_uncommitted_changes_are_marked():
    mixed = finished(paper.eight_workloads(runs(run(), run("mtbench", commit="f" * 40))))
    assert mixed.warnings == ("Mixed code: 0123456789ab | ffffffffffff (+: with uncommitted changes).",)
    changed = finished(paper.eight_workloads(runs(run(dirty=True))))
    assert changed.warnings == ("Code with uncommitted changes: 0123456789ab+.",)


def test_strict_fails_on_missing_cells_and_names_one(tmp_path):
    table = finished(paper.eight_workloads(eight()))
    with pytest.raises(Missing, match=r"\d+ cells without a value, .* aime25 0.7 .*no conversation"):
        write(table, tmp_path, strict=True)
    assert (tmp_path / "eight_workloads.md").exists()


def test_the_same_runs_give_the_same_bytes_and_their_provenance(tmp_path):
    for folder in ("a", "b"):
        write(finished(paper.eight_workloads(eight())), tmp_path / folder)
    files = sorted((tmp_path / "a").iterdir())
    assert {file.name.partition(".")[2] for file in files} == {"md", "tex", "csv", "html", "provenance.json"}
    for file in files:
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    kept = json.loads((tmp_path / "a" / "eight_workloads.provenance.json").read_text())
    assert len(kept["runs"]) == 16
    assert kept["runs"][0]["source"] == "records"
    assert kept["runs"][0]["sha256"] == {"target_weights": "t", "draft_weights": "d", "data": "p"}
    assert kept["runs"][0]["code"] == "0123456789ab"
    assert {
        "row": ["smollm2-135m", "aime25", "0.7"],
        "column": "tau: reset",
        "n": 0,
        "reason": "no conversation",
    } in kept["missing"]


def two_by_two(**changes):
    cells = (Cell(1.5, n=9, p=0.01), Cell(1.61234, 1.4, 1.8, n=9, p=0.04))
    rows = (Row(("a_b", "50 %"), cells, "x"), Row(("c", "d"), (Cell(None, n=3, reason="why"), Cell(1.0)), "y"))
    columns = (Column("fixed", "tau", "tau", "tau"), Column("reset", "ratio", "tau", "tau"))
    data = runs(run())
    return Table("t", "A & B", ("one", "two"), columns, rows, data.runs, ("A note.",), **changes)


def test_markdown_latex_and_csv_of_one_table():
    table = finished(two_by_two())
    assert [cell.significant for _, _, cell in table.cells()] == [True, True, False, False]
    markdown = as_markdown(table, mark="†")
    assert "| a_b | 50 % | 1.500† | **1.612×†** [1.400, 1.800] |" in markdown  # noqa: RUF001
    assert "| c | d | — (3) | 1.000× |" in markdown  # noqa: RUF001
    latex = as_latex(table, mark="†")
    assert r"\caption{A \& B}" in latex
    assert r" & & \multicolumn{2}{c}{tau} \\" in latex
    assert r"\cmidrule(lr){3-4}" in latex
    interval = r"\shortstack[r]{\textbf{1.612$\times$\textdagger{}}\\{\scriptsize [1.400, 1.800]}}"
    assert rf"a\_b & 50 \% & 1.500\textdagger{{}} & {interval} \\" in latex
    assert latex.count(r"\midrule") == 2
    header, first, second = csv.reader(as_csv(table).splitlines())
    assert header == ["one", "two", "tau: fixed", "tau: fixed, n", "tau: fixed, p", "tau: reset", "tau: reset, n",
                      "tau: reset, low", "tau: reset, high", "tau: reset, p"]  # fmt: skip
    assert first == ["a_b", "50 %", "1.5", "9", "0.02", "1.61234", "9", "1.4", "1.8", "0.04"]
    assert second[2] == ""


def test_best_is_of_a_row_or_of_a_column_and_no_ratio_below_one_is():
    columns = (Column("speedup", "ratio", compare="s"), Column("other", "ratio"))
    rows = tuple(Row((name,), (Cell(v), Cell(v))) for name, v in (("a", 0.8), ("b", 0.9)))
    below = finished(Table("t", "T", ("n",), columns, rows, runs(run()).runs, best_down=True))
    assert not any(cell.best for _, _, cell in below.cells())
    rows = tuple(dataclasses.replace(row, cells=(Cell(row.cells[0].value + 0.2), Cell(1.0))) for row in rows)
    above = finished(Table("t", "T", ("n",), columns, rows, runs(run()).runs, best_down=True))
    assert [cell.best for _, _, cell in above.cells()] == [False, False, True, False]


def test_latex_special_characters_are_escaped():
    assert latex_escape("50 % of a_b & $x$ {#}") == r"50 \% of a\_b \& \$x\$ \{\#\}"


@pytest.mark.skipif(
    shutil.which("pdflatex") is None, reason="no LaTeX here: apt-get install texlive-latex-recommended"
)
def test_latex_compiles(tmp_path):
    document = r"\documentclass{article}\usepackage{booktabs,graphicx}\begin{document}" + "\n"
    tables = [finished(paper.eight_workloads(eight())), finished(two_by_two())]
    (tmp_path / "t.tex").write_text(document + "\n".join(map(as_latex, tables)) + r"\end{document}")
    done = subprocess.run(["pdflatex", "-halt-on-error", "t.tex"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


def steps(data):
    return related.sensitivity(data, "S", ["adapter.lr"])


OF_SETTINGS = (tuning.settings_table, steps)


@pytest.mark.parametrize(
    "make",
    [
        paper.eight_workloads,
        paper.combinations,
        paper.cross_domain,
        related.benchmarks,
        related.targets,
        related.training_time,
        related.alphas,
        costs.cost_table,
        costs.power_table,
        costs.length_table,
        *OF_SETTINGS,
    ],
)
def test_every_table_is_made_of_nothing_and_of_everything(make):
    """Of nothing it has no number; of everything some, and a value or a reason in each cell."""
    nothing = finished(make(runs()))
    assert not any(isinstance(cell.value, float) for _, _, cell in nothing.cells())
    outer = [None, {"block": 1, "loss": 2.0, "seconds": 0.5, "committed": True}] * 6
    stream = {"domains": ["a"] * 6 + ["b"] * 6, "switches": [6]}
    everything = runs(
        run(), run("gsm8k", "osd", outer=outer, experiment="onlinespec", plain=True), run("stream_a", **stream),
        run("spider", "fixed"), run("spider", "ensemble_reset"),
        *(run("arena", settings={"lr": lr}, experiment="steps", split="dev") for lr in (0.1, 0.2)),
    )  # fmt: skip
    table = make(everything if make in OF_SETTINGS else chosen(everything, ("eight", "onlinespec")))
    assert any(isinstance(cell.value, float) for _, _, cell in table.cells())
    assert all(cell.value is not None or cell.reason for _, _, cell in table.cells())
    done = finished(table)
    assert as_markdown(done).count("\n| ") == len(table.rows) + 2
    assert as_latex(done).count(r" \\" + "\n") >= len(table.rows) + 1


def test_targets_stand_beside_plain_decoding():
    table = related.targets(runs(run("gsm8k", "reset", experiment="onlinespec", plain=True)))
    assert at(table, "0.7", "reset")["speedup: over plain decoding"].value == pytest.approx(1.3 * 1.05, abs=0.02)
    assert at(table, "0.7", "fixed")["speedup: over plain decoding"].value == pytest.approx(1.3)
    assert at(table, "0.7", "plain")["AvgLen"].value == 1.0


def test_tokens_a_second_follow_the_paired_ratio():
    """The second run met a machine twice as fast: its learner, slower than the fixed draft, is not the best."""
    fast = run(adapter="persistent", speedup=0.95, noise=0)
    for row in fast.rows:
        for arm in row["arms"].values():
            arm["seconds"] = {phase: s / 2 for phase, s in arm["seconds"].items()}
    table = finished(paper.eight_workloads(runs(run(speedup=0.98, noise=0), fast)))
    for labels in (("aime24", "0.7"), ("mean of the eight (1 of 8)", "0.7")):
        row = at(table, *labels)
        assert row["tokens/s: fixed"].best
        for adapter, ratio in (("reset", 0.98), ("persistent", 0.95)):
            assert row[f"tokens/s: {adapter}"].value == pytest.approx(ratio * row["tokens/s: fixed"].value)
            assert not row[f"tokens/s: {adapter}"].best
    targets = finished(related.targets(runs(run("gsm8k", speedup=0.98, noise=0), fast), "gsm8k"))
    assert at(targets, "0.7", "fixed")["tokens/s"].best


def test_streams_of_several_workloads_are_streams_of_their_own():
    """Three orders of one workload and one of another are one order of both together."""
    three = [run("aime24", "persistent", order=order) for order in range(3)]
    pool = Pools(runs(*three, run("mtbench", "persistent"))).of(adapter="persistent")
    assert tau_gain(pool).reason == "1 of 3 orders of the stream"
    both = Pools(runs(*three, *(run("mtbench", "persistent", order=o) for o in range(3)))).of(adapter="persistent")
    assert tau_gain(both).p is not None
    apart = Pools(runs(*(run(name, "persistent", n=8) for name in ("aime24", "mtbench")))).of(adapter="persistent")
    assert tau_gain(apart).df == 7  # four blocks of two in each


def test_orders_of_a_stream_are_no_settings():
    def stream(order):
        found = run("stream_a", "persistent", order=order, experiment="steps", split="dev")
        source = {"name": "spider", "seed": order, "limit": 6}
        found.header["config"]["workload"]["sources"] = {"a": source, "b": source}
        return found

    table = tuning.settings_table(runs(*map(stream, range(3))))
    (row,) = table.rows
    assert row.labels[-1] == ""
    assert row.cells[1].n == 36


def test_runs_in_another_order_give_the_same_bytes(tmp_path):
    several = [run(w, a, order=o) for w in ("aime24", "mtbench") for a in ("persistent", "reset") for o in range(3)]
    for folder, order in (("a", several), ("b", several[::-1])):
        for make in (paper.eight_workloads, costs.cost_table, costs.power_table, costs.length_table):
            write(finished(make(runs(*order))), tmp_path / folder)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


def test_training_counts_what_learning_between_requests_took():
    data = runs(run("gsm8k", "osd", speedup=1.0, noise=0.0))
    spent = data.conversations["paired_fixed_seconds"] / 4
    data = dataclasses.replace(data, conversations=data.conversations.assign(
        adapted_outer_seconds=spent, paired_adapted_outer_seconds=spent))  # fmt: skip
    row = at(related.training_time(data), "gsm8k", "0.7", "osd")
    assert row["speedup over fixed: serving"].value == pytest.approx(1.0)
    assert row["speedup over fixed: with training"].value == pytest.approx(0.8)
    assert isinstance(data.runs, pd.DataFrame)
    assert speedup(Pools(data).of(adapter="osd")).n == 12
