"""The report of a load as one HTML file: figures and plots, without scripts and without other files."""

from collections.abc import Callable
from html import escape

from tokenmill.bench.outcomes import Load, Outcome
from tokenmill.bench.svg import Line, line_chart

_BINS = 60
_MOST_POINTS = 400
Moment = Callable[[Outcome], float]
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --a: #1f6feb; --b: #d9730d; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; font-size: 11px; fill: currentColor; }
svg line { stroke: var(--line); } svg .title { font-size: 13px; font-weight: 600; }
svg .label, svg .tick-x { text-anchor: middle; } svg .tick-y { text-anchor: end; }
svg polyline { fill: none; stroke-width: 1.6; }
.line0 { stroke: var(--a); } .line1 { stroke: var(--b); } .key0 { fill: var(--a); } .key1 { fill: var(--b); }
"""


def report_page(title: str, tables: list[list[list[str]]], load: Load) -> str:
    """`tables`: rows of cells each, the first row is the heading."""
    done = [outcome for outcome in load.outcomes if outcome.succeeded]
    plots = [
        _shares("Time to first token", [one.ttft for one in done if one.ttft is not None]),
        _shares("Time between pieces of text", [gap for one in done for gap in one.gaps]),
        _shares("End-to-end latency", [one.seconds for one in done]),
        _over_time(load, done),
        _running(load),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body><h1>{escape(title)}</h1>{''.join(map(_table, tables))}"
        f"<main>{''.join(plots)}</main></body></html>\n"
    )


def _table(rows: list[list[str]]) -> str:
    def row(cells: list[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    body = "".join(row(cells, "td") for cells in rows[1:])
    return f"<table><thead>{row(rows[0], 'th')}</thead><tbody>{body}</tbody></table>"


def _shares(title: str, seconds: list[float]) -> str:
    """The share of values below each value."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    places = (
        sorted({round(last * number / _MOST_POINTS) for number in range(_MOST_POINTS + 1)}) if ordered else []
    )
    points = [(1000 * ordered[place], 100 * (place + 1) / len(ordered)) for place in places]
    return line_chart(title, "milliseconds", "percent below", [Line("", points)])


def _over_time(load: Load, done: list[Outcome]) -> str:
    """Output tokens in each part of the load. A piece of text counts as its share of the request's tokens."""
    width = max(load.seconds / _BINS, 1e-9)
    counts = [0.0] * _BINS
    for outcome in done:
        for moment in outcome.times:
            counts[min(_BINS - 1, int(moment / width))] += outcome.num_tokens / len(outcome.times)
    points = [(number * width, count / width) for number, count in enumerate(counts)]
    return line_chart("Throughput", "seconds", "output tokens/s", [Line("", points, steps=True)])


def _running(load: Load) -> str:
    """How many requests were open, and how many of these had no text yet."""

    def levels(
        begin: Callable[[Outcome], float], end: Callable[[Outcome], float]
    ) -> list[tuple[float, float]]:
        changes = [(begin(one), 1) for one in load.outcomes] + [(end(one), -1) for one in load.outcomes]
        level, points = 0, []
        for moment, change in sorted(changes):
            level += change
            points.append((moment, float(level)))
        return points

    lines = [
        Line("open", levels(lambda one: one.started, lambda one: one.ended), steps=True),
        Line(
            "without text",
            levels(lambda one: one.started, lambda one: one.times[0] if one.times else one.ended),
            steps=True,
        ),
    ]
    return line_chart("Requests", "seconds", "requests", lines)
