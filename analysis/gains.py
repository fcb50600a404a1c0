"""What the runs of some sweeps gained: ``python analysis/gains.py SWEEP…`` prints a Markdown table.

A line is an adapter with its settings; its gain in tau over the fixed draft stands under each workload, with the 95 %
interval over conversations that the run itself computed, and the updates it made.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tracedraft.records import SUMMARY, read_summary
from tracedraft.report import MISSING, markdown, settings_of, varied


def rows(sweeps: Iterable[Path]) -> list[dict[str, Any]]:
    """A row a finished run, each sweep's settings told apart by what varies in it."""
    found = []
    for sweep in sweeps:
        runs = [path.parent for path in sorted(sweep.glob(f"*/{SUMMARY}"))]
        read = [read_summary(run) | {"config": settings_of(run)} for run in runs]
        for row, settings in zip(read, varied(read), strict=True):
            found.append(row | {"sweep": sweep.name, "settings": settings})
    return found


def table(found: list[dict[str, Any]]) -> str:
    workloads = list(dict.fromkeys(row["workload"] for row in found))
    lines: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for row in found:
        lines.setdefault((row["sweep"], row["adapter"], row["settings"]), {})[row["workload"]] = row
    header = ["sweep", "adapter", "settings", *(f"{name}: {what}" for name in workloads for what in ("tau", "gain"))]
    body = [[*key, *(cell for name in workloads for cell in _cells(of.get(name)))] for key, of in lines.items()]
    return markdown([header, *body], ("sweep", "adapter", "settings"))


def _cells(row: dict[str, Any] | None) -> tuple[str, str]:
    if row is None or row["tau"] is None:
        return MISSING, MISSING
    gain, bounds = row["tau_gain"], row["tau_gain_interval"]
    interval = "" if bounds is None else f" [{100 * bounds[0] - 100:+.0f}, {100 * bounds[1] - 100:+.0f}]"
    return f"{row['fixed']['tau']:.3f} → {row['tau']:.3f}", f"{100 * gain - 100:+.1f} %{interval}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="+", type=Path, metavar="SWEEP")
    print(table(rows(parser.parse_args().sweeps)), end="")


if __name__ == "__main__":
    main()
