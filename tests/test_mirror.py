"""What W&B is given of a record."""

from __future__ import annotations

import pytest
from test_run import CHAT, composed, conversations

from tracedraft import mirror
from tracedraft.measure import measure


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("mirror") / "run"
    measure(composed(*CHAT, "adapter=persistent", "adapter.every=4", "adapter.guard=true"), folder, None)
    return conversations(folder)


def test_a_row_shows_both_arms_depths_updates_and_drift(recorded):
    for record in recorded:
        row = mirror.row(record)
        answers = [turn["arms"] for turn in record["turns"]]
        accepted, rounds = (sum(a["adapted"][name] for a in answers) for name in ("accepted", "rounds"))
        assert row["tau"] == (accepted + rounds) / rounds
        assert row["fixed.rounds"] == sum(a["fixed"]["rounds"] for a in answers)
        assert row["acceptance.1"] == sum(a["adapted"]["survivals"][0] for a in answers) / sum(
            a["adapted"]["trials"][0] for a in answers
        )
        assert row["updates.attempted"] == sum(len(a["adapted"]["updates"]) for a in answers) > 0
        assert row["drift.weight"] == record["drift"]["weight"]
        assert {"updates.loss", "updates.held_out_before", "updates.held_out_after", "speedup", "near_ties"} <= set(
            row
        )
        assert None not in row.values()


def test_the_update_table_has_a_row_for_each_attempt(recorded):
    table = mirror.update_table(recorded)
    attempts = [u for r in recorded for turn in r["turns"] for u in turn["arms"]["adapted"]["updates"]]
    assert len(table) == len(attempts)
    for line, update in zip(table, attempts, strict=True):
        named = dict(zip(mirror.UPDATE_COLUMNS, line, strict=True))
        for name in ("round", "committed", "reason", "loss"):
            assert named[name] == update[name]
        assert named["held_out_kl_after"] == update["held_out_after"]
        assert named["positions"] == sum(update["positions"].values())
