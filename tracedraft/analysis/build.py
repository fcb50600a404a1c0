"""``make tables``: all notebooks of ``analysis/`` in one process, which reads the runs once."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tracedraft.analysis import notebook
from tracedraft.errors import UserError


def notebooks(folder: Path) -> list[Path]:
    """The notebooks in a folder, by name."""
    return [path for path in sorted(folder.glob("*.py")) if path.read_text(encoding="utf-8").startswith("# %%")]


def run(paths: list[Path]) -> int:
    """Run notebooks as scripts, making every table that can be made; the exit status."""
    try:
        notebook.load()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    notebook.failed = failed = []
    try:
        for path in paths:
            print(f"{path}", file=sys.stderr)
            try:
                runpy.run_path(str(path), run_name="__main__")
            except UserError as error:
                failed.append(f"{path}: {error}")
    finally:
        notebook.failed = None
    for error in failed:
        print(f"error: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run([Path(name) for name in sys.argv[1:]] or notebooks(notebook.HERE)))
