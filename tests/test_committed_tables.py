"""The committed tables and figures are what the committed records make, byte by byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracedraft.analysis import build, figures, notebook
from tracedraft.analysis.packed import ENDING

ANALYSIS = Path(__file__).parents[1] / "analysis"


@pytest.mark.skipif(not list((ANALYSIS / "records").glob(f"*{ENDING}")), reason="no records are committed")
def test_records_make_the_tables_and_figures_that_are_committed(tmp_path, monkeypatch):
    for name in ("SOURCE", "DIR", "STRICT", "ALLOW", "MARK"):
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
    for file in made:
        committed = ANALYSIS / file.relative_to(tmp_path)
        assert committed.exists(), f"{committed}: run `make tables` and commit it"
        assert file.read_bytes() == committed.read_bytes(), f"{committed}: run `make tables` and commit it"
    notebook._load.cache_clear()
