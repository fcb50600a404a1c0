"""What a run shows while it runs: conversation, tokens/s and accepted length so far, speedup so far."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from tracedraft.summary import Sums, paired_seconds
from tracedraft.types import Response


class Progress:
    """A live bar on a terminal, one line a conversation elsewhere; on stderr, since tables go to stdout."""

    def __init__(self, conversations: int, names: dict[str, str]):
        self.console = Console(stderr=True)
        self.live = self.console.is_terminal
        self.total, self.done, self.label = conversations, 0, f"{names['workload']} {names['adapter']}"
        self.fixed, self.adapted, self.paired = Sums("fixed"), Sums("adapted"), [0.0, 0.0]
        self.serving = self.so_far = ""
        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[numbers]}"),
            console=self.console,
            disable=not self.live,
        )
        self.task = self.bar.add_task(self.label, total=conversations, numbers="")

    def __enter__(self) -> Progress:
        self.bar.start()
        if not self.live:
            self.console.print(f"{self.label}: {self.total} conversations", highlight=False)
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def resume(self, records: list[dict[str, Any]]) -> None:
        """What earlier attempts did."""
        for record in records:
            self._add(record)
        self.so_far = self.numbers()
        self.bar.update(self.task, completed=len(records), numbers=self.so_far)
        if records:
            self.console.print(f"{self.label}: goes on after {len(records)} conversations", highlight=False)

    def response(self, arm: str, response: Response) -> None:
        """After each answered turn of an arm."""
        seconds = sum(response.seconds.values())
        self.serving = f"{arm}: {len(response.tokens) / seconds:.1f} tok/s" if seconds else arm
        self.bar.update(self.task, numbers=f"{self.so_far}  {self.serving}")

    def conversation(self, record: dict[str, Any]) -> None:
        """After each conversation, with the record that was just written."""
        self._add(record)
        self.so_far = self.numbers()
        self.bar.update(self.task, advance=1, numbers=self.so_far)
        if record["refused"]:
            refused = record["refused"]
            self.console.print(
                f"refused {record['id']}: turn {refused['turn']} has {refused['tokens']} tokens, "
                f"the context is {refused['context']}",
                highlight=False,
            )
        if not self.live:
            self.console.print(f"{self.label} {self.done}/{self.total} {self.so_far}", highlight=False)

    def _add(self, record: dict[str, Any]) -> None:
        self.done += 1
        for arm in (self.fixed, self.adapted):
            arm.add(record)
        self.paired = [a + b for a, b in zip(self.paired, paired_seconds(record), strict=True)]

    def numbers(self) -> str:
        """Sums over the conversations so far."""
        if not self.done:
            return ""

        def text(value: float | None, digits: int) -> str:
            return "—" if value is None else f"{value:.{digits}f}"

        fixed, adapted = self.paired
        return (
            f"tau {text(self.fixed.tau, 2)} → {text(self.adapted.tau, 2)}  "
            f"tok/s {text(self.fixed.tokens_per_s, 1)} → {text(self.adapted.tokens_per_s, 1)}  "
            f"speedup {text(fixed / adapted if adapted else None, 3)}"
        )
