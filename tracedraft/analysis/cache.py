"""Runs that were read once, kept as Parquet and found again by a hash of all that they were read from.

Nothing in here can be stale: a file with one other byte, or another version of the code that reads it, has another
hash. Whatever is wrong with a cache, it is made anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from tracedraft import counts, records, summary
from tracedraft.analysis import frames, packed, schema, sources, wandb_api, wandb_log
from tracedraft.analysis.frames import NOTES, Tables, joined, tables_of
from tracedraft.analysis.sources import STRANGE, Item, digest, file_digest
from tracedraft.files import write_atomically

# What decides what is made of a run.
CODE = (counts, records, summary, frames, packed, schema, sources, wandb_api, wandb_log)
TOKEN = b"tracedraft"  # in the metadata of the three files: alike in those that were written together


def read(items: Sequence[Item], cache: Path | None) -> tuple[Tables, list[tuple[str, str]]]:
    """The runs, in order, and (path, reason) of those that could not be read at all.

    Args:
        cache: a folder to keep them in; None: read everything, keep nothing.

    Raises:
        UserError: the cache can't be written.
    """
    code = [file_digest(Path(str(module.__file__))) for module in CODE]
    keys = [digest([item.key, *code]) for item in items]
    place = cache and cache / digest(sorted(item.path for item in items))[:16]
    kept = place and _load(place)
    known = _parts(kept) if kept else {}
    parts, order, lost = [], [], []
    for item, key in zip(items, keys, strict=True):
        if key not in known:
            run, problem = item.read()
            if run is None:
                lost.append((item.path, problem or "holds no run"))
                continue
            try:
                known[key] = tables_of(run, key, problem)
            except STRANGE as error:
                lost.append((item.path, f"not a run as this version writes it ({error!r})"))
                continue
        parts.append(known[key])
        order.append(key)
    if kept and kept.runs["_key"].to_pylist() == order:
        return kept, lost
    whole = joined(parts)
    if place:
        _save(whole, place)
    return whole, lost


def _parts(tables: Tables) -> dict[str, Tables]:
    """Each run's own rows, by its key."""
    sizes = [tables.runs[name].to_pylist() for name in ("conversations", "_updates")]
    ends = [list(accumulate(each)) for each in sizes]
    found = {}
    for i, key in enumerate(tables.runs["_key"].to_pylist()):
        slices = (
            table.slice(end[i] - size[i], size[i]) for table, size, end in zip(tables[1:], sizes, ends, strict=True)
        )
        found[key] = Tables(tables.runs.slice(i, 1), *slices)
    return found


def _files(place: Path) -> list[Path]:
    return [place / f"{name}.parquet" for name in Tables._fields]


def _load(place: Path) -> Tables | None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        tables = Tables(*(pq.read_table(file) for file in _files(place)))
    except (OSError, pa.ArrowException):
        return None
    tokens = {(table.schema.metadata or {}).get(TOKEN) for table in tables}
    whole = len(tokens) == 1 and None not in tokens and set(NOTES) <= set(tables.runs.column_names)
    return tables if whole else None


def _save(tables: Tables, place: Path) -> None:
    import pyarrow.parquet as pq

    token = {TOKEN: digest(tables.runs["_key"].to_pylist()).encode()}
    for table, file in zip(tables, _files(place), strict=True):
        marked: Any = table.replace_schema_metadata(token)
        write_atomically(file, lambda path, marked=marked: pq.write_table(marked, path), "choose another cache")
