"""Draws the results as SVG, beside their file: tokens per second, and the seconds between tokens.

A bar is a median, its whisker the minimum and the maximum of all repeats. A hatched bar with `<` is a bound:
the engine was cut short, and is slower than the bar. Run in the environment `plots`.

    python -m benchmarks.serving.plots RESULTS.json
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")

import matplotlib.pyplot as plt

from benchmarks.serving.extent import extent
from benchmarks.serving.figures import spread
from benchmarks.serving.plan import Cell, Place
from benchmarks.serving.record import Record
from benchmarks.serving.systems import OURS, SYSTEMS

OUR_COLOUR, OTHERS_COLOUR = "#1f6feb", "#9aa4b2"
FIGURES: dict[str, tuple[str, Callable[[dict[str, Any]], float]]] = {
    "speed": ("tokens per second", lambda figures: float(figures["tokens_per_second"])),
    "tail": (
        "99th percentile of seconds between tokens",
        lambda figures: float(figures["inter_token_seconds"].get("p99", 0.0)),
    ),
}


def draw(record: Record, name: str, path: Path) -> None:
    """One panel for each model, dtype and workload."""
    title, _ = FIGURES[name]
    places = list(dict.fromkeys(run.cell.place for run in record.runs))
    if not places:
        return
    columns = min(3, len(places))
    rows = -(-len(places) // columns)
    drawing, panels = plt.subplots(rows, columns, figsize=(5.2 * columns, 2.6 * rows), squeeze=False)
    for panel, place in zip(panels.flat, places, strict=False):
        _panel(panel, record, place, name)
    for panel in panels.flat[len(places) :]:
        panel.set_visible(False)
    drawing.suptitle(title)
    drawing.tight_layout()
    drawing.savefig(path, metadata={"Date": None})
    plt.close(drawing)


def _bounds(panel: Any, record: Record, place: Place) -> None:
    """Engines that were cut short had the requests of our runs, and had not ended after these seconds."""
    ours = [run.figures for run in record.runs if run.cell == Cell(*place, OURS)]
    for system in SYSTEMS if ours else ():
        if seconds := record.cut_short.get(Cell(*place, system)):
            most = ours[0]["output_tokens"] / seconds
            panel.barh([system], [most], color="none", edgecolor=OTHERS_COLOUR, hatch="//")
            panel.text(most, system, f" < {most:.0f}", va="center", fontsize=7)


def _panel(panel: Any, record: Record, place: Place, name: str) -> None:
    _, figure = FIGURES[name]
    values = {
        system: [figure(run.figures) for run in record.runs if run.cell == Cell(*place, system)]
        for system in SYSTEMS
    }
    bars = {system: spread(several) for system, several in reversed(values.items()) if several}
    panel.barh(
        list(bars),
        [bar.median for bar in bars.values()],
        xerr=[
            [bar.median - bar.least for bar in bars.values()],
            [bar.most - bar.median for bar in bars.values()],
        ],
        color=[OUR_COLOUR if system == OURS else OTHERS_COLOUR for system in bars],
    )
    if name == "speed":
        _bounds(panel, record, place)
    panel.set_title(f"{', '.join(place)}\n{extent(record, place)}", fontsize=9)
    panel.tick_params(labelsize=8)


def main() -> None:
    path = Path(sys.argv[1])
    for name in FIGURES:
        drawn = path.with_name(f"{path.stem}-{name}.svg")
        draw(Record.read(path), name, drawn)
        print(f"drawn: {drawn}", file=sys.stderr)


if __name__ == "__main__":
    main()
