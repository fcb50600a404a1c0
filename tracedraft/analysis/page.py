"""One HTML page of all tables and figures, with what they were made from: no script, nothing fetched, prints well."""

from __future__ import annotations

import base64
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from tracedraft.analysis import notebook
from tracedraft.analysis.pooling import flattened
from tracedraft.analysis.rendering import environment
from tracedraft.analysis.schema import Runs
from tracedraft.errors import UserError
from tracedraft.files import write_atomically

TITLE = "Drafts that keep learning while they serve"


@dataclass(frozen=True)
class Section:
    """A heading, and the names of the tables and figures under it, with what a figure shows."""

    title: str
    tables: tuple[str, ...]
    figures: tuple[tuple[str, str], ...] = ()


SECTIONS = (
    Section("Eight workloads", ("eight_workloads",)),
    Section(
        "Where an update pays for itself", ("lengths",),
        (("gain_by_length", "Gain by tokens of the conversation, with 95 % intervals."),
         ("acceptance_by_depth", "Share of drafted tokens accepted, by their place in the draft."),
         ("phase_shares", "What a token's time goes into.")),
    ),
    Section("Streams that change domain", ("cross_domain",),
            (("over_stream", "Accepted length and tokens/s along the stream, over five conversations each; "
              "a dashed line where the domain changes."),)),
    Section("Learning between requests", ("combinations",),
            (("over_stream_outer", "Accepted length and tokens/s of learners between requests, along the stream."),
             ("ensemble_weights", "Share of each step size in what the ensemble serves."),
             ("regret", "Loss before learning from a block, summed, beyond the best step size's in hindsight, and "
              "accepted length."))),
    Section("In OnlineSPEC's layouts", ("onlinespec_benchmarks", "onlinespec_targets", "onlinespec_training_time",
                                        "onlinespec_step_size", "onlinespec_warm_up"),
            (("step_size", "What a step size does."),)),
    Section("In OSD's layouts", ("osd_alpha", "osd_loss", "osd_tokens")),
    Section("Settings", ("settings",)),
    Section("Costs and sample sizes", ("costs", "power")),
)  # fmt: skip


def build(folder: Path, data: Runs) -> str:
    """The page of what ``make tables`` left in ``folder``.

    Raises:
        UserError: it left nothing there.
    """
    sections = [made for section in SECTIONS if (made := _section(section, folder))["parts"]]
    if not sections:
        raise UserError(f"{folder}: no tables there: run `make tables` first, with the same OUT")
    runs = sorted(data.runs["experiment"].unique())
    return (
        environment()
        .get_template("page.html")
        .render(
            title=TITLE,
            sections=sections,
            facts=facts(data),
            experiments=[experiment(name, data.runs[data.runs["experiment"] == name]) for name in runs],
            problems=data.problems,
        )
    )


def _section(section: Section, folder: Path) -> dict[str, Any]:
    parts = []
    for name in section.tables:
        if (file := folder / "tables" / f"{name}.html").exists():
            parts.append({"html": file.read_text(encoding="utf-8")})
    for name, caption in section.figures:
        if (file := folder / "figures" / f"{name}.svg").exists():
            parts.append({"name": name, "caption": caption, "data": base64.b64encode(file.read_bytes()).decode()})
    return {"title": section.title, "parts": parts}


def facts(data: Runs) -> list[tuple[str, list[str]]]:
    """What the runs ran on, each with how many did."""
    runs = data.runs
    said = {True: "lossless", False: "not lossless", None: "not audited"}
    audits = Counter(said[value] for value in runs["lossless"])
    tokens = int(data.conversations["audited"].sum())
    return [
        ("runs", [f"{len(runs)}, with {len(data.conversations)} conversations"]),
        *((name, _counted(runs[name])) for name in ("hardware", "versions", "code", "target", "draft")),
        ("audit", [f"{tokens:,} tokens", *(f"{name}: {count} runs" for name, count in sorted(audits.items()))]),
    ]


def _counted(values: pd.Series) -> list[str]:
    return [f"{value} ({count} runs)" for value, count in sorted(Counter(values).items())]


def experiment(name: str, runs: pd.DataFrame) -> dict[str, Any]:
    """The config that its runs share, and of each run what is its own."""
    flat = [flattened(config) for config in runs["config"]]
    first = flat[0]
    shared = {key for key in first if all(other.get(key, _ABSENT) == first[key] for other in flat)}
    own = sorted(set().union(*flat) - shared)
    rows = [
        {
            "name": name,
            "fingerprint": fingerprint,
            "complete": complete,
            "own": [json.dumps(config[key], ensure_ascii=False) if key in config else "" for key in own],
        }
        for name, fingerprint, complete, config in zip(
            runs["name"], runs["fingerprint"], runs["complete"], flat, strict=True
        )
    ]
    config = OmegaConf.create({})
    for key in first:
        if key in shared:
            OmegaConf.update(config, key, first[key], force_add=True)
    return {
        "name": name,
        "shared": OmegaConf.to_yaml(config),
        "own": own,
        "rows": sorted(rows, key=lambda r: r["name"]),
    }


_ABSENT = object()


def main() -> int:
    options = notebook.Options.from_environment()
    file = options.out / "report.html"
    try:
        text = build(options.out, notebook.load())
        write_atomically(file, lambda path: path.write_text(text, encoding="utf-8"), "choose another OUT")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{file} written: {file.stat().st_size / 1e6:.1f} MB", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
