"""Makes the golden file of the installed W&B client, of which each supported one needs its own: run this script."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import wandb

FOLDER = Path(__file__).parent / "data" / "logs"
CONFIG = {
    "adapter": {"lr": 1e-8, "clip": None, "at_rounds": [5]},
    "counts": 1,
    "attempts": [{"git": {"dirty": False}}],
}
ROWS = [
    {"tau": 1.5, "counts": '{"index":0,"id":"é"}'},
    {"tau": 2.0, "counts": '{"index":1}' + " " * 70_000},  # over three blocks of the file
]


def main() -> None:
    # Nothing about the machine that it was made on.
    settings = wandb.Settings(
        silent=True, console="off", disable_git=True, disable_code=True, host="golden", x_disable_meta=True,
        x_disable_stats=True, x_disable_machine_info=True, program="golden", root_dir="golden",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run = wandb.init(
            mode="offline", project="p", group="g", dir=folder, id="f-a1-x", config=CONFIG, settings=settings
        )
        run.define_metric("counts", summary="none", hidden=True)
        for step, row in enumerate(ROWS):
            run.log(row, step=step)
        run.summary.update({"tau": 1.75})
        run.finish(exit_code=0)
        wandb.teardown()
        (file,) = Path(folder).glob("wandb/offline-run-*/*.wandb")
        FOLDER.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, FOLDER / f"{wandb.__version__}.wandb")


if __name__ == "__main__":
    sys.exit(main())
