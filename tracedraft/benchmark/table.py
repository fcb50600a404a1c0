"""The result of a bench as Markdown."""

from __future__ import annotations

from typing import Any

from tracedraft.benchmark.numbers import ALL
from tracedraft.report import MISSING, markdown, number


def text(result: dict[str, Any]) -> str:
    tables = speeds(result), ratios(result)
    return "\n".join((headline(result), *tables, "".join(f"- {line}\n" for line in remarks(result))))


def speeds(result: dict[str, Any]) -> str:
    """A row an arm: tokens/s on each workload, and more of all together."""
    workloads = named(result)
    table = [["arm", *(f"{name}, tok/s" for name in workloads), "tok/s", "ms a token", "tau", "observe + update"]]
    for arm, found in result["workloads"][ALL]["arms"].items():
        own = [result["workloads"][name]["arms"][arm] for name in workloads]
        rates = [f"{1e3 / numbers['ms_per_token']['median']:.1f}" for numbers in (*own, found)]
        share = between(found["learning_share"], 1, 100, " %")
        table.append([arm, *rates, between(found["ms_per_token"], 1), number(found["tau"], 2), share])
    return markdown(table, ("arm",))


def ratios(result: dict[str, Any]) -> str:
    """A row a ratio of speeds: its median and interval on each workload, and of all together."""
    workloads = named(result)
    table = [["ratio of speed", *workloads, "all" if workloads else "median [95 %]", "aim", "reached"]]
    for name, found in result["workloads"][ALL]["ratios"].items():
        aim = result["aims"].get(name, {"ratio": None, "workload": None, "met": None, "reason": None})
        own = [result["workloads"][workload]["ratios"][name] for workload in workloads]
        shown = [between(one, 2, bounds="interval") for one in own]
        reached = {True: "yes", False: "no", None: MISSING}[aim["met"]]
        on = aim["reason"] or (aim["workload"] and f"on {aim['workload']}")
        cells = [between(found, 2, bounds="interval"), number(aim["ratio"], 2), reached + (f" ({on})" if on else "")]
        table.append([name.replace("_", " "), *shown, *cells])
    return markdown(table, ("ratio of speed", "reached"))


def named(result: dict[str, Any]) -> list[str]:
    """The workloads that have columns of their own: one alone is all there is."""
    names = [name for name in result["workloads"] if name != ALL]
    return names if len(names) > 1 else []


def headline(result: dict[str, Any]) -> str:
    origin, specs = result["provenance"], result["specs"]
    machine, versions = origin["hardware"], origin["versions"]
    mode = next(iter(specs["decodes"].values()))
    first = next(iter(result["workloads"][ALL]["arms"].values()))
    asked = ", ".join(f"{len(ids)} of {name}" for name, ids in result["prompts"].items())
    return (
        f"{machine['cpu']}, {machine['logical_cores']} cores, {', '.join(machine['gpus']) or 'no GPU'}; "
        f"{origin['torch_threads']} threads, load before {origin['load_average']:.1f}; torch {versions['torch']}, "
        f"transformers {versions['transformers']}\n"
        f"{result['target']} in {specs['target']['dtype']} on {specs['target']['device']}, draft {result['draft']}, "
        f"temperature {mode['temperature']:g}; prompts: {asked}; at most {mode['max_new_tokens']} tokens each, "
        f"{len(first['repetitions'])} repetitions: median [quartiles]; of ratios [95 % over prompts]\n"
    )


def remarks(result: dict[str, Any]) -> list[str]:
    lines = []
    for found in result["parted"].values():
        if found is not None:
            ours, other = found["arms"]
            lines.append(
                f"{other} and {ours} chose other tokens from some place on in {found['parted']} of "
                f"{found['prompts']} answers, {found['near_ties']} of them at a near-tie"
            )
    return lines + [f"{name} was not measured: {reason}" for name, reason in result["null_reasons"].items()]


def between(
    found: dict[str, Any] | None, digits: int, times: float = 1, unit: str = "", bounds: str = "quartiles"
) -> str:
    """A median with its quartiles, or what else is said to bound it, where there are any."""
    if found is None:
        return MISSING
    around = [number(times * bound, digits) for bound in found.get(bounds) or []]
    return number(times * found["median"], digits, unit) + (f" [{', '.join(around)}]" if around else "")
