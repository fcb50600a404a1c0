import io
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from tracedraft.report import SweepTable, read_runs, result_markdown, result_table, row, runs_of, show


def summary(**changes):
    return {
        "workload": "sample_math",
        "adapter": "persistent",
        "draft": "eagle3",
        "target": "smollm2-135m",
        "conversations": 12,
        "tokens": 3456,
        "tau": 1.5312,
        "tokens_per_s": 61.26,
        "speedup": 1.0894,
        "lossless": True,
        "updates": {"attempted": 31, "committed": 29, "rolled_back": {"drift": 2}},
        "fixed": {"tau": 1.4061, "tokens_per_s": 56.27},
    } | changes


NOTHING = dict.fromkeys(["tau", "tokens_per_s", "speedup", "lossless"]) | {
    "conversations": 0,
    "tokens": 0,
    "fixed": {"tau": None, "tokens_per_s": None},
}
FULL = ["12", "3456", "1.406 → 1.531", "56.3 → 61.3", "1.089×", "29/31", "✓"]  # noqa: RUF001


def printed(rows, width, encoding="utf-8"):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    show(result_table(rows), file, width)
    file.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("width", [1, 20, 40, 80, 100, 200])
def test_numbers_are_whole_at_any_width(width):
    rows = [row(summary()), row(summary(tokens=123456789, lossless=False, workload="a" * 40))]
    text = printed(rows, width)
    body = [line.split("│") for line in text.splitlines() if "→ 1.531" in line]
    assert len(body) == 2
    assert [cell.strip() for cell in body[0][3:-1]] == FULL
    assert [cell.strip() for cell in body[1][3:-1]] == [FULL[0], "123456789", *FULL[2:-1], "✗"]
    # Names fold and lose nothing.
    first_column = "".join(line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│"))
    assert first_column == "sample_math" + "a" * 40


def test_a_table_fits_the_terminal_where_its_numbers_do():
    lines = printed([row(summary(workload="w" * 60))], 120).splitlines()
    assert max(map(len, lines)) <= 120


def test_a_plain_console_does_not_cut_numbers_that_fit():
    console = Console(file=io.StringIO(), width=130)
    console.print(result_table([row(summary(workload="w" * 60))]))
    for cell in FULL:
        assert cell in console.file.getvalue()


def test_missing_is_a_dash():
    text = result_markdown([row(summary(**NOTHING)), row({})])
    body = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    assert body[0][2:] == ["0", "0", "— → —", "— → —", "—", "29/31", "—"]
    assert body[1] == ["—", "—", "—", "—", "— → —", "— → —", "—", "—/—", "—"]


def test_markdown_holds_the_cells_of_the_table():
    rows = [row(summary()), row(summary(workload="a|b", adapter="[red]x[/red]"))]
    header, rule, first, second = result_markdown(rows).splitlines()
    assert header.count("|") == rule.count("|") == first.count("|") == 10
    assert [c.strip() for c in first.split("|")[3:-1]] == FULL
    assert second.startswith("| a\\|b | [red]x[/red] | 12 |")
    assert re.fullmatch(r"(\| -{3}:? )+\|", rule)
    assert "[red]x[/red]" in printed(rows, 200)


def test_an_encoding_without_the_signs_does_not_raise():
    text = printed([row(summary(lossless=None))], 120, encoding="ascii")
    assert "1.406 ? 1.531" in text


def make_sweep(folder: Path, names):
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "summary.json").write_text(json.dumps(summary(adapter=name)))


def test_a_sweep_is_read_in_natural_order_and_failures_are_listed(tmp_path, capsys):
    names = ["0_a", "1_a", "2_a", "10_a", "10_b2", "10_b10"]
    make_sweep(tmp_path, reversed(names))
    (tmp_path / "3_x").mkdir()
    (tmp_path / "11_x").mkdir()
    (tmp_path / "11_x" / "summary.json").write_text('{"tau": 1')
    (tmp_path / "multirun.yaml").write_text("")
    rows, failed = read_runs(runs_of(tmp_path))
    assert [r["adapter"] for r in rows] == names
    assert [name for name, _ in failed] == ["3_x", "11_x"]
    config = OmegaConf.create({"runs": str(tmp_path), "hydra": {"sweep": {"dir": "${runs}"}}})
    for _ in range(2):  # again, over its own table
        SweepTable().on_multirun_end(config, config_name="config")
        out = capsys.readouterr().out
        assert out.count("1.406 → 1.531") == len(names)
        assert "failed: 3_x (no summary.json)\n" in out
        markdown = (tmp_path / "table.md").read_text()
        assert markdown.startswith(result_markdown(rows))
        assert "- 3_x (no summary.json)\n" in markdown
        assert "- 11_x (" in markdown
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["multirun.yaml", "table.md"]


def test_a_sweep_over_settings_shows_which_run_had_which(tmp_path):
    make_sweep(tmp_path, ["0", "1", "2"])
    for name, lr, every in (("0", 0.01, 8), ("1", 0.03, 8), ("2", 0.03, 16)):
        (tmp_path / name / "summary.json").write_text(json.dumps(summary(adapter="reset")))
        config = {"adapter": {"lr": lr, "every": every, "name": "reset"}, "paths": {"runs": name}, "seed": 0}
        OmegaConf.save(config, tmp_path / name / "config.yaml")
    rows, _ = read_runs(runs_of(tmp_path))
    assert [r["settings"] for r in rows] == ["every=8 lr=0.01", "every=8 lr=0.03", "every=16 lr=0.03"]
    assert "| settings |" in result_markdown(rows).splitlines()[0]
    assert "every=16 lr=0.03" in printed(rows, 200)


def test_keys_of_one_name_are_told_apart_and_other_adapters_do_not_count(tmp_path):
    make_sweep(tmp_path, ["0_a", "1_a", "2_b"])
    for name, seeds in (("0_a", (0, 0)), ("1_a", (1, 2)), ("2_b", (5, 5))):
        OmegaConf.save({"seed": seeds[0], "workload": {"seed": seeds[1]}}, tmp_path / name / "config.yaml")
        kind = {"adapter": name[-1]}
        (tmp_path / name / "summary.json").write_text(json.dumps(summary(**kind)))
    settings = [r["settings"] for r in read_runs(runs_of(tmp_path))[0]]
    assert settings == ["seed=0 workload.seed=0", "seed=1 workload.seed=2", "seed=5 workload.seed=5"]


def test_options_of_a_group_are_told_apart_by_name_and_by_what_differs_beside_it(tmp_path):
    make_sweep(tmp_path, ["0", "1", "2"])
    chain, tree = {"name": "chain", "_target_": "a.Chain", "chain_length": 5}, {"name": "tree", "_target_": "a.Tree"}
    for name, decode in (("0", chain | {"top_k": 0}), ("1", tree | {"top_k": 0}), ("2", tree | {"top_k": 9})):
        (tmp_path / name / "summary.json").write_text(json.dumps(summary(adapter="reset")))
        OmegaConf.save({"decode": decode}, tmp_path / name / "config.yaml")
    settings = [r["settings"] for r in read_runs(runs_of(tmp_path))[0]]
    assert settings == ["decode=chain top_k=0", "decode=tree top_k=0", "decode=tree top_k=9"]


def test_a_stream_s_seed_stands_for_those_of_its_sources(tmp_path):
    make_sweep(tmp_path, ["0", "1"])
    for seed in (0, 1):
        workload = {"name": "stream", "seed": seed, "sources": {"a": {"seed": seed, "pool": 3}, "b": {"seed": seed}}}
        OmegaConf.save({"workload": workload}, tmp_path / str(seed) / "config.yaml")
        (tmp_path / str(seed) / "summary.json").write_text(json.dumps(summary(adapter="reset")))
    assert [r["settings"] for r in read_runs(runs_of(tmp_path))[0]] == ["seed=0", "seed=1"]


def test_without_varied_settings_there_is_no_such_column(tmp_path):
    make_sweep(tmp_path, ["0_a", "1_b"])
    assert "settings" not in result_markdown(read_runs(runs_of(tmp_path))[0])


APP = """
    import json, hydra
    from pathlib import Path
    from hydra.core.hydra_config import HydraConfig

    @hydra.main(version_base="1.3", config_path=None, config_name=None)
    def main(cfg):
        if cfg.fail:
            raise ValueError("this one fails")
        out = Path(HydraConfig.get().runtime.output_dir)
        (out / "summary.json").write_text(json.dumps({"workload": "w", "adapter": cfg.name, "tau": 1.5}))

    main()
"""


@pytest.mark.parametrize("fail", ["false", "true,false"])
def test_hydra_prints_the_table_once_even_when_a_job_fails(tmp_path, fail):
    (tmp_path / "app.py").write_text(textwrap.dedent(APP))
    overrides = [
        f"+fail={fail}",
        "+name=a,b",
        "hydra.output_subdir=null",
        "hydra.sweep.dir=out_${now:%f}",  # one value for the whole sweep
        "+hydra.callbacks.table._target_=tracedraft.report.SweepTable",
    ]
    path = str(Path(__file__).parents[1])
    command = [sys.executable, "app.py", "-m", *overrides]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": path, "PYTHONUTF8": "1"}, capture_output=True, text=True
    )
    failures = fail.count("true") * 2
    assert done.returncode == (1 if failures else 0), done.stderr
    assert done.stdout.count("— → 1.500") == 2
    assert done.stdout.count("failed: ") == failures
    (table,) = tmp_path.glob("out_*/table.md")
    assert table.read_text().count("— → 1.500") == 2
    assert table.read_text().count("(no summary.json)") == failures


def test_import_is_cheap():
    code = "import sys, tracedraft.report; sys.exit(bool({'torch', 'wandb', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_file_gets_the_names_unfolded():
    file = io.StringIO()
    show(result_table([row(summary(workload="w" * 60))]), file)
    assert "w" * 60 in file.getvalue()
    assert "persistent" in file.getvalue()
