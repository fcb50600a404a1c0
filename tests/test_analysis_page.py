"""The notebooks from end to end: figures, the HTML page in a real browser, and the blocks of the W&B report."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from tests.table_cases import run, runs
from tracedraft import statistics
from tracedraft.analysis import build, figures, notebook, page, panels, paper, wandb_report
from tracedraft.analysis.panels import block_losses
from tracedraft.analysis.pooling import Pools, chosen
from tracedraft.errors import UserError

ROOT = Path(__file__).parents[1]
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
NOTEBOOKS = build.notebooks(ROOT / "analysis")


def ensemble(n: int, every: int = 4) -> list:
    """What an ensemble of two records: the second is better from the start, and gets its share."""
    found: list = [None] * n
    for block, at in enumerate(range(every - 1, n, every), 1):
        learners = {
            "lrs": [1e-4, 2e-4],
            "p": [1 / (1 + block), block / (1 + block)],
            "losses": [2.0, 1.0],
            "after": [2.0, 1.0],
        }
        found[at] = {"block": block, "loss": 1.5, "loss_after": 1.4, "seconds": 0.1, "learners": learners}
    return found


def everything():
    halves = ["maths"] * 6 + ["chat"] * 6
    return runs(
        *(run(w, a, temperature=t, order=o) for w in ("aime24", "mtbench") for t in (0.7, 0.0)
          for a, orders in (("reset", [0]), ("persistent", [0, 1, 2])) for o in orders),
        *(run("stream_a", a, domains=halves, switches=[6], experiment="cross_domain") for a in paper.INNER),
        *(run("gsm8k", a, experiment="combinations", outer=ensemble(12)) for a in ("ensemble", "ensemble_reset")),
        *(run("arena", settings={"lr": lr}, experiment="ablate_step", split="dev", measure="acceptance")
          for lr in (0.01, 0.1)),
    )  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """All that the notebooks and the page make of these runs."""
    out, data = tmp_path_factory.mktemp("out"), everything()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "RESAMPLES", 299)
        patch.setattr(notebook, "_load", lambda *_: data)
        patch.setattr(figures, "UNDATED", {"svg": figures.UNDATED["svg"]})
        patch.setenv("OUT", str(out))
        assert build.run(NOTEBOOKS) == 0
        assert page.main() == 0
    return out


def test_notebooks_have_short_cells_and_write_all_that_the_page_shows(built):
    for path in NOTEBOOKS:
        for cell in re.split(r"^# %%.*$", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
            assert len([line for line in cell.splitlines() if line.strip()]) <= 10, path
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not any(isinstance(node, ast.FunctionDef | ast.For | ast.While) for node in ast.walk(tree)), path
    names = {name for section in page.SECTIONS for name in section.tables}
    pictures = {name for section in page.SECTIONS for name, _ in section.figures}
    assert {file.name.partition(".")[0] for file in (built / "tables").iterdir()} == names
    assert {file.stem for file in (built / "figures").iterdir()} == pictures


def test_figures_are_the_same_bytes_again(tmp_path):
    pools = panels.by_temperature(chosen(everything(), "eight"), paper.INNER)
    for folder in ("a", "b"):
        figures.save(figures.by_depth(pools), tmp_path / folder, "depth")
    files = sorted((tmp_path / "a").iterdir())
    assert [file.suffix for file in files] == [".pdf", ".png", ".svg"]
    for file in files:
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def lines(axes):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_lines_show_sums_over_a_window_and_the_switch():
    data = chosen(everything(), "cross_domain")
    figure = figures.over_stream(panels.by_stream(data, paper.INNER), window=3)
    left = figure.axes[0]
    at, tau = lines(left)["reset"]
    pool = Pools(data).of(adapter="reset").sort_values("position").iloc[4:7]

    def own(arm: str) -> float:
        accepted, rounds = pool[f"{arm}_accepted"].sum(), pool[f"{arm}_rounds"].sum()
        return (accepted + rounds) / rounds

    assert at == list(range(12))
    assert tau[6] == pytest.approx(lines(left)["fixed"][1][6] * own("adapted") / own("fixed"))
    assert [5.5, 5.5] in [x for x, _ in lines(left).values()]


def test_a_learner_on_a_busy_machine_is_drawn_by_what_stood_beside_it():
    """Twice as slow as the other's runs, its fixed arm as well: its tokens/s stay those of its speedup."""
    data = chosen(everything(), "cross_domain")
    ((title, both),) = panels.by_stream(data, paper.INNER).items()

    def drawn(slow: float) -> list[float]:
        seconds = [f"{arm}_seconds" for arm in ("fixed", "adapted")]
        persistent = both["persistent"].assign(**{name: both["persistent"][name] * slow for name in seconds})
        right = lines(figures.over_stream({title: {**both, "persistent": persistent}}).axes[1])
        return [a / b for a, b in zip(right["persistent"][1], right["fixed"][1], strict=True)]

    assert drawn(2.0) == pytest.approx(drawn(1.0))


def test_depth_and_phases_are_ratios_of_sums():
    pools = panels.by_temperature(chosen(everything(), "eight"), paper.INNER)
    (depth, *_) = figures.by_depth(pools).axes
    pool = pools["smollm2-135m, T = 0.7"]["reset"]
    first = [sum(row[0] for row in pool[f"adapted_{name}"]) for name in ("survivals", "trials")]
    assert lines(depth)["reset"][1][0] == pytest.approx(first[0] / first[1])
    (phases, *_) = figures.phase_shares(pools).axes
    whole = {bar.get_y(): bar.get_x() + bar.get_width() for bar in phases.patches}
    assert whole[min(whole)] == pytest.approx(1e3 / 60)  # the fixed arm makes 60 tokens a second


def test_an_adapter_looks_the_same_whatever_stands_beside_it(monkeypatch):
    data = chosen(everything(), "cross_domain")
    panels_of = panels.by_stream(data, paper.INNER)
    ((title, both),) = panels_of.items()
    alone = {title: {"persistent": both["persistent"]}}
    colours = [figure_of(shown, "persistent") for shown in (panels_of, alone)]
    assert colours[0] == colours[1] != figure_of(panels_of, "reset")
    two = figures.over_stream({"a": {"reset": both["reset"]}, "b": {"persistent": both["persistent"]}})
    (legend,) = two.legends
    assert [text.get_text() for text in legend.get_texts()] == ["fixed", "reset", "persistent"]


def figure_of(shown, adapter):
    """The colour of its line along a stream."""
    (line,) = [line for line in figures.over_stream(shown).axes[0].get_lines() if line.get_label() == adapter]
    return line.get_color()


def test_streams_that_were_not_timed_show_accepted_length_alone():
    halves = ["a"] * 6 + ["b"] * 6
    data = runs(run("stream_a", domains=halves, switches=[6], measure="acceptance"))
    figure = figures.over_stream(panels.by_stream(data, paper.INNER))
    assert [axes.get_ylabel() for axes in figure.axes] == ["accepted length"]


def test_ranges_with_too_few_for_an_interval_are_hollow():
    found = run()
    for row in found.rows[:2]:
        for arm in row["arms"].values():
            arm["tokens"] = 20
    (axes,) = figures.by_length(panels.by_temperature(runs(found), paper.INNER)).axes
    hollow = axes.get_lines()[0]
    assert hollow.get_markerfacecolor() == "white"
    bars = [bar for bar in axes.containers if bar.has_yerr]
    assert len(bars[0].lines[0].get_xdata()) < len(hollow.get_xdata())


def test_step_sizes_whose_runs_differ_in_more_are_left_out_and_the_axis_is_no_microscope():
    steps = [
        run("gsm8k", settings={"lr": lr}, gain=1 + lr / 20, experiment="steps", measure="acceptance", noise=0)
        for lr in (0.1, 0.2)
    ]
    (axes,) = figures.learning_rates(panels.by_step(runs(*steps))).axes
    low, high = axes.get_ylim()
    assert (high - low) / low > 0.04
    mixed = panels.by_step(runs(*steps, run("gsm8k", settings={"lr": 0.1, "every": 4}, order=1, experiment="steps")))
    assert mixed == {"steps: reset, T = 0.7": {}}
    (axes,) = figures.learning_rates(mixed).axes
    assert "differ in more than their step size" in axes.texts[0].get_text()


def test_regret_is_measured_from_the_best_in_hindsight():
    pool = Pools(everything()).of(adapter="ensemble")
    at, learner, base, lrs = block_losses(pool)
    assert (at, lrs) == ([1, 2, 3], [1e-4, 2e-4])
    assert (learner.tolist(), base.tolist()) == ([1.5] * 3, [[2.0, 1.0]] * 3)
    (regret, *_) = figures.regret({"e": pool}).axes
    assert lines(regret)["served"][1] == pytest.approx(np.cumsum([0.5] * 3))
    assert lines(regret)["step 0.0002"][1] == pytest.approx([0, 0, 0])
    assert regret.get_title().endswith("each step size for one block")


def test_a_base_learner_that_broke_is_neither_the_best_nor_in_the_way():
    outer = ensemble(12)
    for block in outer[4:]:
        if block:
            block["learners"] |= {"losses": [None, 1.0], "after": [], "p": [0.0, 1.0]}
    pool = Pools(runs(run("gsm8k", "ensemble", outer=outer))).of(adapter="ensemble")
    assert lines(figures.regret({"e": pool}).axes[0])["served"][1] == pytest.approx(np.cumsum([0.5] * 3))
    figures.ensemble_weights({"e": pool})


def test_figures_of_nothing_say_so():
    for figure in (
        figures.over_stream({}),
        figures.regret({}),
        figures.ensemble_weights({}),
        figures.learning_rates({}),
    ):
        assert any("no " in text.get_text() for axes in figure.axes for text in axes.texts)
    for figure in (figures.by_depth({}), figures.by_length({}), figures.phase_shares({})):
        assert len(figure.axes) == 1
        assert [text.get_text() for text in figure.axes[0].texts] == ["no runs"]


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.targets, self.ids, self.images = [], set(), 0

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.targets += [values[name] for name in ("href", "src") if name in values]
        self.ids |= {values["id"]} if "id" in values else set()
        self.images += tag == "img"
        assert tag not in ("script", "iframe", "link")


def test_the_page_needs_nothing_else_and_shows_every_run(built):
    text = (built / "report.html").read_text()
    found = Links()
    found.feed(text)
    assert found.images == 8
    assert all(target.startswith(("#", "data:")) for target in found.targets)
    assert {target[1:] for target in found.targets if target.startswith("#")} <= found.ids
    assert "@import" not in text
    assert "url(" not in text
    for name in everything().runs["name"]:
        assert f">{name}<" in text
    assert "chain_length: 5" in text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_a_browser(built, tmp_path, width):
    """No sideways scrolling but in tables, and every picture is drawn. In a frame: windows have a least width."""
    probe = """<script>addEventListener("load", () => parent.postMessage(JSON.stringify({
        width: document.documentElement.scrollWidth, window: innerWidth, images: document.images.length,
        broken: [...document.images].filter(image => !image.naturalWidth).length,
        small: [...document.querySelectorAll("*")].filter(e => parseFloat(getComputedStyle(e).fontSize) < 10).length
    }), "*"))</script></body>"""
    (tmp_path / "page.html").write_text((built / "report.html").read_text().replace("</body>", probe))
    file = tmp_path / "frame.html"
    file.write_text(
        "<title></title><script>addEventListener('message', event => { document.title = event.data })</script>"
        f'<iframe src="page.html" style="border: 0; width: {width}px; height: 900px"></iframe>'
    )
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom"]
    place = [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--window-size=1400,1000"]
    done = subprocess.run([CHROMIUM, *options, *place, file.as_uri()], capture_output=True, text=True, timeout=60)
    title = re.search(r"<title>({.*?})</title>", done.stdout)
    assert title, done.stderr[-500:]
    seen = json.loads(title[1])
    assert seen["window"] == width
    assert seen["width"] <= width
    assert (seen["broken"], seen["images"], seen["small"]) == (0, 8, 0)


def test_the_page_says_when_there_is_nothing_to_show(tmp_path):
    with pytest.raises(UserError, match="run `make tables` first"):
        page.build(tmp_path, everything())


def test_runs_share_a_config_and_keep_what_is_their_own():
    found = page.experiment("x", runs(run(), run("mtbench", order=3)).runs)
    assert "lr: 0.03" in found["shared"]
    assert found["own"] == ["workload.name", "workload.seed"]
    assert [row["own"] for row in found["rows"]] == [['"aime24"', "0"], ['"mtbench"', "3"]]


def test_a_wandb_report_has_the_same_tables_and_plots_of_the_same_runs(built):
    wr = pytest.importorskip("wandb_workspaces.reports.v2")
    found = wandb_report.blocks(built, everything(), "someone", "drafts")
    headings = [block.text for block in found if isinstance(block, wr.H1)]
    assert headings == [section.title for section in page.SECTIONS] + ["Along the streams", "Provenance"]
    tables = [block.text for block in found if isinstance(block, wr.MarkdownBlock)]
    whole = (built / "tables" / "eight_workloads.md").read_text()
    assert whole.endswith(tables[0] + "\n")
    grids = [block for block in found if isinstance(block, wr.PanelGrid)]
    assert [grid.runsets[0].name for grid in grids] == [
        "ablate_step",
        "combinations",
        "cross_domain",
        "eight_workloads",
    ]
    assert {grid.runsets[0].project for grid in grids} == {"drafts"}
    assert grids[0].panels[0].y == ["tau", "fixed.tau"]


def test_a_wandb_report_is_made_only_online(monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb_report.main() == 0
    assert "WANDB_MODE=online" in capsys.readouterr().err


@pytest.mark.parametrize(("key", "value"), [("SOURCE", "logs"), ("ALLOW", "all")])
def test_a_bad_option_is_named_with_what_there_is(monkeypatch, key, value):
    monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match=f"{key}={value}: expected"):
        notebook.Options.from_environment()


def test_a_refused_table_fails_the_command_and_not_the_others(tmp_path, monkeypatch, capsys):
    stream = run("stream_a", domains=["a"] * 6 + ["b"] * 6, experiment="cross_domain")
    mixed = runs(run(), run("mtbench", versions={"python": "4"}), stream)
    monkeypatch.setattr(notebook, "_load", lambda *_: mixed)
    monkeypatch.setattr(statistics, "RESAMPLES", 299)
    monkeypatch.setenv("OUT", str(tmp_path))
    assert build.run([path for path in NOTEBOOKS if path.stem in ("cross_domain", "eight_workloads")]) == 1
    said = capsys.readouterr().err
    assert "table eight_workloads: runs of different versions" in said
    assert "table lengths: runs of different versions" in said
    assert (tmp_path / "tables" / "cross_domain.md").exists()
    assert not list((tmp_path / "tables").glob("eight_workloads.*"))
    with pytest.raises(UserError, match="different versions"):
        notebook.table("eight_workloads", paper.eight_workloads, mixed)


def test_what_cannot_even_be_made_leaves_the_rest_of_its_notebook_and_nothing_older(tmp_path, monkeypatch, capsys):
    """Learners of other settings can't stand in one table, which spoils those of methods, and not those of steps."""
    data = runs(run("gsm8k", experiment="short_workloads"),
                run("gsm8k", order=1, settings={"lr": 0.1}, experiment="short_workloads"))  # fmt: skip
    monkeypatch.setattr(notebook, "_load", lambda *_: data)
    monkeypatch.setattr(statistics, "RESAMPLES", 299)
    monkeypatch.setenv("OUT", str(tmp_path))
    (tmp_path / "tables").mkdir()
    for name in ("onlinespec_targets.md", "onlinespec_targets.provenance.json", "audit.md"):
        (tmp_path / "tables" / name).write_text("of another day")
    assert build.run([path for path in NOTEBOOKS if path.stem == "related_work"]) == 1
    said = capsys.readouterr().err
    assert "onlinespec_targets: adapter.lr=0.03, 0.1" in said
    left = {file.name for file in (tmp_path / "tables").iterdir()}
    assert "audit.md" in left
    assert "onlinespec_step_size.md" in left
    assert not any(name.startswith("onlinespec_targets") for name in left)
    (tmp_path / "figures").mkdir(exist_ok=True)
    (tmp_path / "figures" / "depth.png").write_text("of another day")
    with pytest.raises(UserError, match=r"adapter\.lr"):
        notebook.figure("depth", figures.by_depth, panels.by_temperature, data, paper.INNER)
    assert not (tmp_path / "figures" / "depth.png").exists()


def test_records_at_hand_reach_the_reader_of_a_server(monkeypatch):
    asked = {}
    monkeypatch.setattr(notebook, "load_runs", lambda paths, **options: asked.update(options) or everything())
    monkeypatch.setenv("SOURCE", "wandb-api")
    monkeypatch.setenv("DIR", "someone/project")
    monkeypatch.setenv("RECORDS", "runs/a runs/b")
    notebook._load.cache_clear()
    notebook.load()
    notebook._load.cache_clear()
    assert (asked["source"], asked["records"]) == ("wandb-api", ("runs/a", "runs/b"))
    monkeypatch.setenv("SOURCE", "records")
    with pytest.raises(UserError, match="RECORDS=runs/a runs/b: only SOURCE=wandb-api"):
        notebook.Options.from_environment()
