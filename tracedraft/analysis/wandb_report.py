"""The page as a W&B report: the same tables as Markdown, and W&B's own plots of the same runs."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from tracedraft.analysis import notebook
from tracedraft.analysis.page import SECTIONS, TITLE, facts
from tracedraft.analysis.schema import Runs
from tracedraft.errors import UserError

ALONG = (  # what tracedraft.mirror logs of each conversation
    ("Accepted length along the stream", ["tau", "fixed.tau"]),
    ("Tokens/s along the stream", ["tokens_per_s", "fixed.tokens_per_s"]),
    ("Updates committed", ["updates.committed"]),
)


def blocks(folder: Path, data: Runs, entity: str, project: str) -> list[Any]:
    """The report, block by block; nothing is asked of a server.

    Args:
        folder: where ``make tables`` left its tables.
    """
    wr = _workspaces()
    found: list[Any] = [wr.TableOfContents()]
    for section in SECTIONS:
        files = [folder / "tables" / f"{name}.md" for name in section.tables]
        tables = [file.read_text(encoding="utf-8").partition("\n")[2] for file in files if file.exists()]
        if tables:
            found += [wr.H1(text=section.title), *(wr.MarkdownBlock(text=table.strip()) for table in tables)]
    found.append(wr.H1(text="Along the streams"))
    for name in sorted(data.runs["experiment"].unique()):
        found += [wr.H2(text=name), _panels(name, entity, project)]
    listed = "\n".join(f"- **{title}**: {'; '.join(values)}" for title, values in facts(data))
    return [*found, wr.H1(text="Provenance"), wr.MarkdownBlock(text=listed)]


def _panels(experiment: str, entity: str, project: str) -> Any:
    import wandb_workspaces.expr as expr

    wr = _workspaces()
    group = expr.And(expr.Metric("Group") == experiment)
    runs = wr.Runset(entity=entity, project=project, name=experiment, filters=group)
    plots = [
        wr.LinePlot(title=title, x="Step", y=names, layout=wr.Layout(x=8 * i, y=0, w=8, h=6))
        for i, (title, names) in enumerate(ALONG)
    ]
    return wr.PanelGrid(runsets=[runs], panels=plots)


def publish(folder: Path, data: Runs, entity: str | None, project: str) -> str:
    """Save the report in a project; returns its address.

    Raises:
        UserError: wandb-workspaces is not installed, or the server refused.
    """
    import wandb

    wr = _workspaces()
    try:
        owner = entity or wandb.Api().default_entity or ""
        report = wr.Report(project=project, entity=owner, title=TITLE, blocks=blocks(folder, data, owner, project))
        return report.save().url
    except Exception as error:  # its client raises dozens of unrelated types
        raise UserError(f"no W&B report in {project}: {type(error).__name__}: {error}") from error


def _workspaces() -> Any:
    """Its reports; the package's own types refuse what its examples do."""
    try:
        return importlib.import_module("wandb_workspaces.reports.v2")
    except ImportError as error:
        raise UserError("a W&B report needs wandb-workspaces: pip install 'tracedraft[report]'") from error


def main() -> int:
    """Only where W&B is asked to be online: a report is seen by others."""
    if os.environ.get("WANDB_MODE") != "online":
        print("no W&B report: WANDB_MODE=online, with your key, makes one", file=sys.stderr)
        return 0
    options, project = notebook.Options.from_environment(), os.environ.get("WANDB_PROJECT") or "tracedraft"
    try:
        print(publish(options.out, notebook.load(), os.environ.get("WANDB_ENTITY"), project))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
