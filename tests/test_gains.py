"""The table of what sweeps gained: a line a setting, a column a workload."""

import json
from pathlib import Path

from omegaconf import OmegaConf

from analysis.gains import rows, table


def run(folder: Path, workload: str, lr: float, fixed: float, tau: float | None, bounds: list[float] | None) -> None:
    folder.mkdir(parents=True)
    gain = None if tau is None else tau / fixed
    numbers = {"tau": tau, "fixed": {"tau": fixed}, "tau_gain": gain, "tau_gain_interval": bounds}
    (folder / "summary.json").write_text(json.dumps({"workload": workload, "adapter": "reset", **numbers}))
    OmegaConf.save({"adapter": {"lr": lr}}, folder / "config.yaml")


def test_a_line_is_a_setting_and_workloads_stand_side_by_side(tmp_path):
    for i, (workload, lr, tau) in enumerate((("a", 0.1, 1.5), ("b", 0.1, 1.8), ("a", 0.2, 1.2), ("b", 0.2, None))):
        run(tmp_path / "steps" / str(i), workload, lr, 1.5, tau, [0.9, 1.3] if workload == "b" and tau else None)
    (tmp_path / "steps" / "unfinished").mkdir()
    header, _, *lines = table(rows([tmp_path / "steps"])).splitlines()
    assert header == "| sweep | adapter | settings | a: tau | a: gain | b: tau | b: gain |"
    assert lines == [
        "| steps | reset | lr=0.1 | 1.500 → 1.500 | +0.0 % | 1.500 → 1.800 | +20.0 % [-10, +30] |",
        "| steps | reset | lr=0.2 | 1.500 → 1.200 | -20.0 % | — | — |",
    ]
