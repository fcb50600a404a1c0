"""The script that writes the table of what an update costs, on the tiny pair and a short answer."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from tracedraft.config import shipped_dir

SCRIPT = shipped_dir("conf").parent / "analysis" / "update_cost.py"


def test_the_table_has_a_row_for_each_form(tmp_path: Path, monkeypatch):
    spec = importlib.util.spec_from_file_location("update_cost", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "update_cost", script)  # where dataclasses look for their module
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "ROUNDS", 64)
    monkeypatch.setattr(script, "REPEATS", 3)
    monkeypatch.setattr(script, "WINDOWS", (32,))
    out = tmp_path / "tables" / "cost.md"
    script.main(["target=tiny", "draft=tiny", "decode.max_new_tokens=24"], out)
    rows = [line.split(" | ") for line in out.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    for form in script.FORMS:
        assert sum(row[0] == f"| {form}" for row in rows) == 2
    assert all(float(row[3].split()[0]) > 0 for row in rows if len(row) == 4 and row[1] == "32")
