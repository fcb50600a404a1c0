"""Where a draft's checkpoint lies: shipped with the package, in a folder, or on the hub."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tracedraft.config import ASSETS
from tracedraft.errors import UserError


def locate(path: str | None, revision: str | None, kind: str, dry: str) -> Path:
    """The folder of ``draft.path``, fetched from the hub if need be; a name without a slash ships with the package.

    Args:
        kind: of draft, as targets name theirs; dry: the option for dry runs.

    Raises:
        UserError: not to be had.
    """
    if path is None:
        raise UserError(
            f"draft.path is not set, and the target names no {kind} draft: give draft.path=FOLDER_OR_HUB_ID, "
            f"or draft={dry} for a dry run"
        )
    folder = ASSETS / path if "/" not in path else Path(path)
    if folder.is_dir():
        return folder
    reason = "no such folder"
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", path):
        try:
            return _fetched(path, revision)
        except Exception as error:  # the hub client raises many kinds, all meaning: not to be had
            reason += f", and not on the hub: {str(error).splitlines()[0]}"
    raise UserError(
        f"draft.path={path!r}: {reason} (a name without a slash ships with the package, "
        "./NAME lies here); python -m tracedraft.train makes one"
    )


@cache
def _fetched(name: str, revision: str | None) -> Path:
    """A hub repository, looked up once a process: both arms of a run must have the same draft."""
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "pytorch_model.bin"]
    return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
