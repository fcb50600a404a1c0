"""Runs of the tiny pair from the composed config, and their records, for the tests of whole runs."""

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from tracedraft import measure as measuring
from tracedraft.config import shipped_dir
from tracedraft.meter import PHASES
from tracedraft.records import CONVERSATIONS

SHORT = ("target=tiny", "draft=tiny", "wandb.mode=disabled", "workload.limit=2", "decode.max_new_tokens=20")
CHAT = ("workload=sample_chat", "decode.max_new_tokens=32", "adapter.every=4")
SAMPLED = ("decode.temperature=0.7", "decode.top_p=0.95")


def composed(*overrides: str) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(shipped_dir("conf")), version_base="1.3"):
        return compose("config", [*SHORT, *overrides])


def conversations(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / CONVERSATIONS).read_text().splitlines()]


def untimed(folder: Path) -> list[dict]:
    """The records of a run without their seconds."""
    records = conversations(folder)
    for record in records:
        for turn in record["turns"]:
            for arm in turn["arms"].values():
                assert arm.pop("seconds").keys() == set(PHASES)
    return records


def arms(records: list[dict], name: str) -> list[dict]:
    return [turn["arms"][name] for record in records for turn in record["turns"]]


def prompts_file(folder: Path, *questions: tuple[str, ...]) -> tuple[str, ...]:
    """Overrides that serve the given conversations in their order."""
    rows = [{"id": f"q/{i}", "turns": list(turns)} for i, turns in enumerate(questions)]
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    order = ("workload.order=file", "workload.limit=null")
    return ("workload=gsm8k", f"paths.data={folder}", *order)


def interrupted(cfg, folder: Path, after: int, sweep: str | None = None) -> None:
    """Stop a run once ``after`` records are on disk, as SIGINT would, in the middle of the next answer."""
    converse, served = measuring.converse, []

    def stop(*arguments):
        if len(served) == after:
            raise KeyboardInterrupt
        served.append(1)
        return converse(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "converse", stop)
        with pytest.raises(KeyboardInterrupt):
            measuring.measure(cfg, folder, sweep)
