"""The committed tables and figures are what the committed records make, byte by byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracedraft.analysis import build, figures, notebook
from tracedraft.analysis.packed import ENDING

ANALYSIS = Path(__file__).parents[1] / "analysis"
SPEED = {f"speed{of}.{ending}" for of in ("", "_eagle") for ending in ("md", "png")}
BY_HAND = {"audit.md", "tuning.md", "update_cost.md"} | SPEED  # of no notebook
PICTURES = (".svg", ".pdf", ".png")


@pytest.mark.skipif(not list((ANALYSIS / "records").glob(f"*{ENDING}")), reason="no records are committed")
def test_records_make_the_tables_and_figures_that_are_committed(tmp_path, monkeypatch):
    for name in ("SOURCE", "DIR", "RECORDS", "STRICT", "ALLOW", "MARK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(ANALYSIS.parent)
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("TRACEDRAFT_CACHE", str(tmp_path / "cache"))
    # Of figures the vector files that are text: the others differ between builds of the libraries below matplotlib.
    monkeypatch.setattr(figures, "UNDATED", {"svg": figures.UNDATED["svg"]})
    notebook._load.cache_clear()
    assert build.run(build.notebooks(ANALYSIS)) == 0
    made = sorted(file for kind in ("tables", "figures") for file in (tmp_path / kind).iterdir())
    assert made
    committed = {file.name for kind in ("tables", "figures") for file in (ANALYSIS / kind).iterdir()} - BY_HAND
    wanted = {file.name for file in made} | {
        file.stem + ending for file in made if file.suffix == ".svg" for ending in PICTURES
    }
    assert committed == wanted, f"{sorted(committed ^ wanted)}: no notebook makes it, or it is not committed"
    for file in made:
        kept = ANALYSIS / file.relative_to(tmp_path)
        assert file.read_bytes() == kept.read_bytes(), f"{kept}: run `make tables` and commit it"
    notebook._load.cache_clear()
