"""Entry points. Nothing heavy is imported before the configuration is composed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from tracedraft.config import shipped_dir
from tracedraft.errors import UserError

USAGE = """usage: tracedraft COMMAND [overrides]

  run         measure a learner: tracedraft run workload=sample_chat adapter=persistent
              over several:      tracedraft run -m workload=sample_math,sample_chat adapter=reset,persistent
  status      where the runs of a sweep stand, at any time: tracedraft status SWEEP_FOLDER
  logs        what one of them said: tracedraft logs SWEEP_FOLDER RUN
  check       what runs fall short of before they are published: tracedraft check SWEEP_FOLDER
  pack        a sweep's records as one small file for a commit: tracedraft pack SWEEP_FOLDER
  sync        upload offline W&B runs, each checked: tracedraft sync SWEEP_FOLDER
  train       train a draft for a target: tracedraft train target=smollm2-135m draft=eagle3 out=FOLDER
  eval-draft  accepted length, acceptance by depth, vocabulary coverage and cost of a draft:
              tracedraft eval-draft draft.path=FOLDER workload=sample_chat
  export      write a draft, and what a run made of it, for SGLang or vLLM:
              tracedraft export draft.path=FOLDER run=RUN_FOLDER layout=speculators out=NEW_FOLDER
  bench       speed of plain decoding beside other engines, of each decode mode beside plain decoding, and what
              learning costs: tracedraft bench workload.limit=6
  bench-gpu   speed beside the limits of the card's memory, of random weights in an 8B model's shape; without a
              GPU a dry run: tracedraft bench-gpu repetitions=5
  prefetch    fetch and convert weights and prompts: tracedraft prefetch target=smollm2-135m workload=gsm8k

tracedraft COMMAND --help lists the options of each configuration group."""


SWEPT = ("target", "draft", "adapter", "workload", "decode")


class OneLine(CompactHydraException):
    """Bad input, which Hydra prints without a traceback."""


def main() -> None:
    """The console script."""
    commands = {
        "run": run,
        "status": status,
        "logs": logs,
        "check": check,
        "pack": pack,
        "sync": sync,
        "train": train,
        "eval-draft": eval_draft,
        "export": export,
        "bench": bench,
        "bench-gpu": bench_gpu,
        "prefetch": prefetch,
    }
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        helped = len(sys.argv) == 2 and sys.argv[1] in ("-h", "--help")
        print(USAGE, file=sys.stdout if helped else sys.stderr)
        raise SystemExit(0 if helped else 2)
    command = sys.argv.pop(1)
    commands[command]()


def _quiet() -> None:
    """No warnings of libraries between the lines that users read, unless their environment asks for them."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def run() -> None:
    """The main job: a run, or a sweep of them."""
    typed = sys.argv
    sys.argv = _late(typed)
    try:
        _run()
    finally:
        sys.argv = typed


def _late(typed: list[str]) -> list[str]:
    """Hydra looks for a sweep's keys in what the groups default to, where those of the options that it goes over need
    not be. Marked by ++ they are first looked for in each run's own config, which names what is unknown.

    Not those of an experiment, which says what its groups default to and may go over such keys itself.
    """
    if any(argument.startswith("experiment=") for argument in typed):
        return typed
    swept = [group for group in SWEPT for a in typed if a.startswith(f"{group}=") and ("," in a or "(" in a)]
    return [f"++{a}" if "=" in a and a.partition(".")[0] in swept else a for a in typed]


@hydra.main(version_base="1.3", config_path=str(shipped_dir("conf")), config_name="config")
def _run(cfg: DictConfig) -> float | None:
    """One run; Hydra calls it once for each of a sweep.

    Returns:
        the speedup over the interleaved fixed arm.
    """
    _quiet()
    from tracedraft.measure import measure
    from tracedraft.report import result_table, row, show

    context = HydraConfig.get()
    swept = context.mode == RunMode.MULTIRUN
    folder = Path(context.runtime.output_dir)
    try:
        if cfg.launcher.dry_run:
            raise UserError("launcher.dry_run=True: only the pool of a sweep can say what it would run: add -m")
        summary = measure(cfg, folder, Path(context.sweep.dir).name if swept else None)
    except UserError as error:
        if not swept:
            _leave(error)
        # The sweep goes on, and Hydra keeps the message to its end.
        print(f"failed: {folder.name}: {error}", file=sys.stderr)
        raise OneLine(f"error: {error}") from None
    except KeyboardInterrupt:
        if swept:
            raise
        print(f"interrupted: the same command with hydra.run.dir={folder} goes on", file=sys.stderr)
        raise SystemExit(130) from None
    if not swept:
        show(result_table([row(summary)]))
        print(f"record: {folder}")
    return summary["speedup"]


def status() -> None:
    """Where the runs of a sweep stand."""
    from tracedraft.launch.status import status as show_status

    (folder,) = _arguments("status SWEEP_FOLDER", 1)
    _plainly(lambda: show_status(Path(folder)))


def logs() -> None:
    """What a run of a sweep said."""
    from tracedraft.launch.status import logs as show_log

    folder, run = _arguments("logs SWEEP_FOLDER RUN", 2)
    _plainly(lambda: show_log(Path(folder), run))


CHECK = """check FOLDER... [conversations=20] [orders=3]

What the runs of sweeps, or packed records, fall short of before they are published: all finished, no token that is
not the target's, one hardware, one set of versions, one commit, no prompt that settings were tuned on, enough
different conversations, and enough orders (workload.seed) for learners that keep what they learn. Exit status 1 if
they fall short of anything."""


def check() -> None:
    """The gate before publishing."""
    from tracedraft.analysis.commands import check as check_runs

    paths, options = _with_options(CHECK, conversations=20, orders=3)
    _leaving(lambda: check_runs(paths, **options))


PACK = """pack SWEEP_FOLDER [FOLDER]

The records of a sweep as FOLDER/NAME.jsonl.gz (FOLDER: analysis/records), for a commit: config, provenance and counts
of every conversation and update, without texts and tokens. Tables are made from it as from the sweep itself."""


def pack() -> None:
    """A sweep's records for a commit."""
    from tracedraft.analysis.commands import pack as pack_runs

    given, _ = _with_options(PACK)
    if len(given) > 2:
        _tell_usage(PACK, helped=False)
    _leaving(lambda: pack_runs(Path(given[0]), Path(*given[1:]) if given[1:] else Path("analysis/records")))


SYNC = """sync FOLDER [timeout=600]

Upload the offline W&B runs of a run, a sweep or several, one by one, each checked, what is broken named and the
others sent. The same again sends what is missing. timeout: seconds for each. Exit status 1 if one was not sent."""


def sync() -> None:
    """Offline W&B runs to their server."""
    from tracedraft.analysis.commands import sync as upload

    given, options = _with_options(SYNC, timeout=600)
    if len(given) > 1:
        _tell_usage(SYNC, helped=False)
    _leaving(lambda: upload(Path(given[0]), **options))


def _arguments(usage: str, count: int) -> list[str]:
    given = sys.argv[1:]
    if len(given) != count or given[0].startswith("-"):
        _tell_usage(usage, helped=given[:1] in (["-h"], ["--help"]))
    return given


def _with_options(usage: str, **options: int) -> tuple[list[str], dict[str, int]]:
    """One argument or more, and whole numbers as ``key=value``, from given defaults on."""
    given = []
    for argument in sys.argv[1:]:
        key, equals, value = argument.partition("=")
        if argument.startswith("-") or (equals and key in options and not value.isdigit()):
            _tell_usage(usage, helped=argument in ("-h", "--help"))
        if equals and key in options:
            options[key] = int(value)
        else:
            given.append(argument)
    if not given:
        _tell_usage(usage, helped=False)
    return given, options


def _tell_usage(usage: str, helped: bool) -> NoReturn:
    print(f"usage: tracedraft {usage}", file=sys.stdout if helped else sys.stderr)
    raise SystemExit(0 if helped else 2)


@hydra.main(version_base="1.3", config_path=str(shipped_dir("conf")), config_name="train")
def train(cfg: DictConfig) -> None:
    """Synthesise a corpus from the target and train a draft on it; both steps go on where they stopped."""
    _quiet()
    from tracedraft.training.command import train_draft

    _plainly(lambda: train_draft(cfg, Path(cfg.out)))


@hydra.main(version_base="1.3", config_path=str(shipped_dir("conf")), config_name="eval-draft")
def eval_draft(cfg: DictConfig) -> None:
    """Acceptance and cost of a draft that does not learn: the first check of a downloaded checkpoint."""
    _quiet()
    from tracedraft.evaluate import evaluate_draft

    _plainly(lambda: evaluate_draft(cfg, Path(HydraConfig.get().runtime.output_dir)))


@hydra.main(version_base="1.3", config_path=str(shipped_dir("conf")), config_name="export")
def export(cfg: DictConfig) -> None:
    """Write a draft in the layout of another engine."""
    _quiet()
    from tracedraft.publish import export_draft

    _plainly(lambda: export_draft(cfg))


@hydra.main(version_base="1.3", config_path=str(shipped_dir("conf")), config_name="bench")
def bench(cfg: DictConfig) -> None:
    """Speed side by side: other engines, plain decoding, each decode mode, and each learner."""
    _quiet()
    from tracedraft.benchmark.command import benchmark
    from tracedraft.benchmark.table import text
    from tracedraft.report import unmake

    def measured() -> None:
        result, file = benchmark(cfg, Path(HydraConfig.get().runtime.output_dir))
        unmake()  # where `out` took the file elsewhere
        print(f"{text(result)}\nrecord: {file}")

    _plainly(measured)


@hydra.main(version_base="1.3", config_path=str(shipped_dir("conf")), config_name="bench-gpu")
def bench_gpu(cfg: DictConfig) -> None:
    """Decoding and updates beside the limits of a GPU."""
    _quiet()
    from tracedraft.benchmark.gpu import benchmark_gpu, text
    from tracedraft.report import unmake

    def measured() -> None:
        result, file = benchmark_gpu(cfg, Path(HydraConfig.get().runtime.output_dir))
        unmake()
        print(f"{text(result)}\nrecord: {file}")

    _plainly(measured)


@hydra.main(version_base="1.3", config_path=str(shipped_dir("conf")), config_name="prefetch")
def prefetch(cfg: DictConfig) -> None:
    """Fetch, convert and cache the weights and the prompts, here or on each machine of a cluster."""
    _quiet()
    from tracedraft.launch.prefetch import prefetch as fetch

    def fetched() -> None:
        machines = fetch(cfg)
        where = "" if cfg.launcher.address is None else f" on {machines} machines"
        print(f"target {cfg.target.name}, draft {cfg.draft.name}, workload {cfg.workload.name}: ready{where}")

    _plainly(fetched)


def _plainly(action: Any) -> None:
    try:
        action()
    except UserError as error:
        _leave(error)


def _leaving(action: Callable[[], int]) -> NoReturn:
    """Exit with the status that a command returns."""
    try:
        raise SystemExit(action())
    except UserError as error:
        _leave(error)


def _leave(error: UserError) -> NoReturn:
    """An exception would have Hydra wrap the one line into three more."""
    from tracedraft.report import unmake

    unmake()
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(2)
