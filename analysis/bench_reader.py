"""How long tables wait for their runs: ``make bench-reader``.

Writes run folders as a sweep leaves them, records and W&B files of the same counts, and reads them in a process of
its own each: without a cache, with one to fill, and from it. Needs 1.2 MB of disk a run.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tracedraft import counts, mirror, records
from tracedraft.analysis.wandb_log import BLOCK, CHUNK, FIRST, FULL, HEADER, LAST, MIDDLE
from tracedraft.meter import PHASES
from tracedraft.provenance import provenance

TOKENS, EVERY, DEPTH, VARIANTS = 256, 8, 5, 64
READ = """
import resource, sys, time
from pathlib import Path
from tracedraft.analysis.runs import load_runs
began = time.perf_counter()
found = load_runs(sys.argv[1], cache=Path(sys.argv[2]) if sys.argv[2] else None)
took = time.perf_counter() - began
assert not found.problems and set(found.runs["source"]) == {"wandb-offline"}, found.problems[:3]
sizes = " runs, ".join(str(len(frame)) for frame in (found.runs, found.conversations))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(f"{sizes} conversations, {len(found.updates)} updates: {took:.1f} s, {peak:.2f} GiB")
"""


def response(rng: random.Random, tokens: list[int], rounds: int, learns: bool) -> dict[str, Any]:
    """An arm's answer, as long as one of the embedded pair."""
    update = {"committed": True, "reason": "", "positions": {"response": 64}, "drift": {"weight": 0.0}}
    measured = ("loss", "grad_norm", "vocab_mass")
    updates = [
        update | {"round": n, "held_out_before": None, "held_out_after": None} | {m: rng.random() for m in measured}
        for n in range(EVERY, rounds if learns else 0, EVERY)
    ]
    return {
        "tokens": tokens, "ended": "limit", "rounds": rounds, "accepted": len(tokens) - 1 - rounds, "cut": 0,
        "accepted_per_round": [rng.randrange(DEPTH) for _ in range(rounds)],
        "trials": [rounds // 2**depth for depth in range(DEPTH)],
        "survivals": [rounds // 2 ** (depth + 1) for depth in range(DEPTH)],
        "updates": updates, "seconds": {phase: round(rng.random(), 9) for phase in PHASES}, "shapes": None,
    }  # fmt: skip


def conversation(rng: random.Random, index: int) -> dict[str, Any]:
    tokens = [rng.randrange(50_000) for _ in range(TOKENS)]
    rounds = rng.randrange(120, 190)
    arms = {"fixed": response(rng, tokens, rounds, False), "adapted": response(rng, tokens, rounds - 9, True)}
    turn = {
        "turn": 0, "prompt_tokens": 90, "text": "words and " * 100, "paired": True, "not_updated": None, "arms": arms,
        "lossless": {"audited": TOKENS, "mismatches": 0, "near_ties": 0, "differing": []},
    }  # fmt: skip
    return {
        "index": index, "id": f"gsm8k/{index}", "domain": "math", "occurrence": 0, "order": list(arms),
        "refused": None, "turns": [turn], "drift": {"weight": rng.random()}, "outer": None,
    }  # fmt: skip


def framed(records: Iterable[bytes]) -> bytes:
    """A file of the log's format: the inverse of ``wandb_log.payloads``."""
    data = bytearray(HEADER)
    for record in records:
        at, first = 0, True
        while first or at < len(record):
            room = BLOCK - len(data) % BLOCK
            if room < CHUNK.size:
                data += bytes(room)
                continue
            part = record[at : at + room - CHUNK.size]
            at, last = at + len(part), at + len(part) == len(record)
            kind = (FULL if last else FIRST) if first else (LAST if last else MIDDLE)
            data += CHUNK.pack(zlib.crc32(part, zlib.crc32(bytes([kind]))), len(part), kind) + part
            first = False
    return bytes(data)


def encoded(id: str, config: dict[str, Any], history: list[dict[str, Any]], exit_code: int) -> bytes:
    """A W&B run as the client writes it, less what tables don't need."""
    from wandb.proto import wandb_internal_pb2

    make = vars(wandb_internal_pb2)["Record"]

    def items(values: dict[str, Any]) -> list[dict[str, str]]:
        return [{"key": key, "value_json": json.dumps(value)} for key, value in values.items()]

    run = make(run={"run_id": id, "config": {"update": items(config)}})
    rows = [make(history={"item": items(row)}) for row in history]
    return framed(record.SerializeToString() for record in (run, *rows, make(exit={"exit_code": exit_code})))


def write(folder: Path, runs: int, conversations: int, config: dict[str, Any]) -> int:
    """Folders of a sweep; bytes on the disk."""
    rng, origin = random.Random(0), provenance()
    variants = [[conversation(rng, index) for index in range(conversations)] for _ in range(VARIANTS)]
    lines = ["".join(json.dumps(record, separators=(",", ":")) + "\n" for record in each) for each in variants]
    history = [[mirror.row(record) for record in each] for each in variants]
    for number in range(runs):
        run, kind = folder / f"run{number:05d}", number % VARIANTS
        fingerprint, named = f"{number:016x}", copy.deepcopy(config) | {"seed": number}
        identity = {"fingerprint": fingerprint, "data": {}, "experiment": folder.name}
        attempt = {"attempt": 1, "from": 0, **origin, **identity}
        log = run / "wandb" / f"offline-run-1-{fingerprint}-a1-x" / f"run-{fingerprint}-a1-x.wandb"
        log.parent.mkdir(parents=True)
        (run / records.CONFIG).write_text(OmegaConf.to_yaml(named))
        (run / records.ATTEMPTS).write_text(json.dumps(attempt) + "\n")
        (run / records.CONVERSATIONS).write_text(lines[kind])
        (run / records.SUMMARY).write_text(json.dumps({"conversations": conversations}))
        header = counts.header(named, [attempt], run, folder.name)
        log.write_bytes(encoded(log.stem.removeprefix("run-"), counts.flat(header), history[kind], 0))
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--conversations", type=int, default=100)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "bench-reader")
    parser.add_argument("--keep", action="store_true", help="what was written")
    args = parser.parse_args()
    sweep, cache = args.folder / "sweep", args.folder / "cache"
    shutil.rmtree(args.folder, ignore_errors=True)
    group = {"name": "bench", "seed": 0, "temperature": 0.7, "top_p": 1.0, "max_new_tokens": TOKENS}
    groups = ("target", "draft", "adapter", "workload", "decode")
    config = dict.fromkeys(groups, group) | {"seed": 0, "measure": "time", "plain": False, "threads": None}
    began = time.perf_counter()
    size = write(sweep, args.runs, args.conversations, config | {"wandb": {"group": None}})
    print(f"written: {size / 1e9:.2f} GB in {time.perf_counter() - began:.0f} s")
    for name, kept in (("without a cache", ""), ("filling a cache", str(cache)), ("from the cache", str(cache))):
        done = subprocess.run([sys.executable, "-c", READ, str(sweep), kept], capture_output=True, text=True)
        print(f"{name}: {done.stdout.strip() or done.stderr}")
    print(f"cache: {sum(file.stat().st_size for file in cache.rglob('*.parquet')) / 1e6:.0f} MB")
    if not args.keep:
        shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
