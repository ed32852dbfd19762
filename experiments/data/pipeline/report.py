"""``report.json`` and ``report.html``: what each stage did, why, and samples of what it dropped."""

from __future__ import annotations

import collections
import dataclasses
import html
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.data.documents import write_json
from experiments.data.pipeline.config import BuildConfig
from experiments.data.pipeline.records import digest_of
from experiments.data.pipeline.stages import StageResult, peak_memory_mb

PLAN_TOKENS = 15e12
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; }
table { border-collapse: collapse; margin: .6rem 0 1.4rem; }
th, td { padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
pre { white-space: pre-wrap; background: #f6f6f4; padding: .6rem; margin: .3rem 0 .8rem; }
summary { cursor: pointer; } .id { color: #666; font-size: 85%; } .bad { color: #a00; }
"""


def build_report(
    config: BuildConfig,
    results: Sequence[StageResult],
    sections: dict[str, Any],
    timings: dict[str, float],
) -> dict[str, Any]:
    """The report as JSON values; all but ``timing`` is the same for any number of workers.

    Args:
      config: the build's.
      results: of the stages, in order.
      sections: more to show, by title: dicts become tables of two columns, lists of dicts
        tables with a head, text paragraphs.
      timings: seconds of what is no stage over documents, by name.
    """
    # Where it ran is no part of what came out.
    plain = dataclasses.asdict(dataclasses.replace(config, workers=None, out=""))
    return {
        "config": plain,
        "config_sha256": digest_of(plain),
        "stages": [
            {
                "name": result.name,
                "documents": result.documents,
                "bytes": result.bytes,
                "shards": len(result.shards),
                "sources": by_source(result),
                **result.tally.to_json(),
            }
            for result in results
        ],
        "sections": sections,
        "timing": {
            "workers": config.processes,
            "peak_memory_mb": peak_memory_mb(),
            "stages": {
                result.name: {
                    "seconds": round(result.seconds, 2),
                    "cpu_seconds": round(result.cpu_seconds, 2),
                    "peak_memory_mb": result.peak_memory_mb,
                    "was_finished_before": result.cached,
                }
                for result in results
            },
            "seconds": timings,
        },
    }


def by_source(result: StageResult) -> dict[str, dict[str, int]]:
    """Documents and bytes of each source after a stage."""
    sums: dict[str, dict[str, int]] = collections.defaultdict(lambda: {"documents": 0, "bytes": 0})
    for shard in result.shards:
        sums[shard.source]["documents"] += shard.documents
        sums[shard.source]["bytes"] += shard.bytes
    return dict(sums)


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Writes ``report.json`` and ``report.html`` into ``folder``."""
    write_json(folder / "report.json", report)
    temporary = folder / "report.html.tmp"
    temporary.write_text(render(report), encoding="utf-8", errors="replace")
    temporary.replace(folder / "report.html")


def render(report: dict[str, Any]) -> str:
    """The report as one HTML page without scripts or outside parts."""
    stages = report["stages"]
    parts = [
        "<!doctype html><meta charset=utf-8><title>Corpus build</title>",
        f"<style>{STYLE}</style><h1>Corpus build</h1>",
        f"<p>Configuration <code>{report['config_sha256'][:12]}</code>, "
        f"{report['timing']['workers']} workers, {report['timing']['peak_memory_mb']:,} MB in the "
        "main process.</p>",
        "<h2>Stages</h2>",
        table(_stage_rows(report)),
        "<h2>Text by source, MB after each stage</h2>",
        table(_source_rows(stages)),
    ]
    if plan := scale_plan(report):
        parts += [
            f"<h2>What {PLAN_TOKENS / 1e12:g}T tokens of this mixture would take, from these "
            "rates</h2>",
            table(plan),
        ]
    for title, value in report["sections"].items():
        parts += [f"<h2>{html.escape(title)}</h2>", _section(value)]
    for stage in stages:
        parts += _stage_details(stage)
    return "\n".join(parts) + "\n"


def _stage_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    before = None
    for stage in report["stages"]:
        timing = report["timing"]["stages"][stage["name"]]
        rows.append(
            {
                "stage": stage["name"],
                "documents after": stage["documents"],
                "MB after": stage["bytes"] / 1e6,
                "documents dropped": sum(stage["dropped"].values()),
                "MB dropped": stage["bytes_dropped"] / 1e6,
                "unreadable": sum(stage["faults"].values()),
                **_rates(timing, stage["bytes"] if before is None else before),
            }
        )
        before = stage["bytes"]
    return rows


def scale_plan(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Core-hours, shards and bytes in and held of each stage for ``PLAN_TOKENS``, by proportion.

    What a build of this size measured, and what its stages must hold at once: 200 bytes per
    document for near duplicates (signature and keys), 0.6 bytes per byte of text for substrings.
    Empty when there is no token count to scale from.
    """
    tokens = report["sections"].get("Tokenizer", {}).get("tokens")
    stages = report["stages"]
    if not tokens or not stages[-1]["bytes"]:
        return []
    scale = PLAN_TOKENS / tokens
    shard = report["config"]["read"]["shard_mb"] * 1e6
    rows, before = [], stages[0]
    for stage in stages:
        cpu = report["timing"]["stages"][stage["name"]]["cpu_seconds"]
        held = {
            "near_duplicates": 200 * before["documents"],
            "substrings": 0.6 * before["bytes"],
        }.get(stage["name"], 0)
        rows.append(
            {
                "stage": stage["name"],
                "CPU seconds per GB": cpu / (before["bytes"] / 1e9),
                "core-hours": cpu * scale / 3600,
                "text in, TB": before["bytes"] * scale / 1e12,
                "shards in": math.ceil(before["bytes"] * scale / shard),
                "held at once, TB (partition by hash)": held * scale / 1e12,
            }
        )
        before = stage
    cpu = report["timing"]["seconds"].get("tokenize, CPU", 0.0)
    size = stages[-1]["bytes"]
    rows.append(
        {
            "stage": "tokenize",
            "CPU seconds per GB": cpu / (size / 1e9),
            "core-hours": cpu * scale / 3600,
            "text in, TB": size * scale / 1e12,
            "shards in": math.ceil(size * scale / shard),
            "held at once, TB (partition by hash)": 0.0,
        }
    )
    return rows


def _rates(timing: dict[str, Any], size: int) -> dict[str, Any]:
    """Wall time, MB of input per second of it, and memory of the largest worker."""
    if timing["was_finished_before"]:
        return {"seconds": "done before", "MB/s": "", "worker's memory, MB": ""}
    return {
        "seconds": timing["seconds"],
        "MB/s": size / 1e6 / max(timing["seconds"], 1e-3),
        "worker's memory, MB": timing["peak_memory_mb"],
    }


def _source_rows(stages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = list(dict.fromkeys(name for stage in stages for name in stage["sources"]))
    return [
        {
            "source": name,
            **{
                stage["name"]: stage["sources"].get(name, {"bytes": 0})["bytes"] / 1e6
                for stage in stages
            },
        }
        for name in names
    ]


def _stage_details(stage: dict[str, Any]) -> Iterable[str]:
    kinds = (("dropped", "Dropped"), ("faults", "Could not be read"), ("changed", "Changed"))
    if not any(stage[key] for key, _ in kinds):
        return
    yield f"<h2>{html.escape(stage['name'])}: what and why</h2>"
    shown = set()
    for key, title in kinds:
        for reason, count in sorted(stage[key].items(), key=lambda item: (-item[1], item[0])):
            shown.add(reason)
            yield _reason(f"{title}: {reason}", f"{count:,}", stage["samples"].get(reason, []))
    for reason, rows in stage["samples"].items():
        if reason not in shown:
            yield _reason(f"Samples: {reason}", "", rows)


def _reason(title: str, count: str, rows: list[list[str]]) -> str:
    head = f"{html.escape(title)} <b>{count}</b>"
    if not rows:
        return f"<p>{head}</p>"
    samples = "".join(
        f"<div class=id>{html.escape(name)} {html.escape(detail)}</div>"
        + (f"<pre>{html.escape(text)}</pre>" if text else "")
        for _, name, text, detail in rows
    )
    return f"<details><summary>{head}</summary>{samples}</details>"


def _section(value: Any) -> str:
    if isinstance(value, dict):
        return table([{"": key, "value": item} for key, item in value.items()])
    if isinstance(value, list):
        return table(value)
    tag = "pre" if "\n" in str(value) else "p"
    return f"<{tag}>{html.escape(str(value))}</{tag}>"


def table(rows: list[dict[str, Any]]) -> str:
    """An HTML table of rows with equal keys; numbers with thousands separators."""
    if not rows:
        return "<p>none</p>"
    head = "".join(f"<th>{html.escape(str(key))}</th>" for key in rows[0])
    body = "".join(
        "<tr>"
        + "".join(f"<td>{html.escape(_cell(value))}</td>" for value in row.values())
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 10 else f"{value:,.1f}"
    return str(value)
