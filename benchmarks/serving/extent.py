"""Describes how much of a whole run a record holds: requests of a workload, repeats of a cell.

Results of fewer requests or repeats than a whole run are always marked as such.
"""

from benchmarks.serving.plan import REPEATS, Cell, Place, repeats_of
from benchmarks.serving.record import Record
from benchmarks.serving.shapes import MODELS
from benchmarks.serving.workloads import count_requests


def extent(record: Record, place: Place) -> str:
    """Such as "24 of 64 requests, 1 to 3 repeats"; empty where nothing ran."""
    served = record.num_requests(place)
    if served is None:
        return ""
    whole = whole_requests(place)
    requests = _counted(served, "request") if served == whole else f"{served} of {_counted(whole, 'request')}"
    counts = [count for cell, count in repeats(record).items() if cell.place == place]
    least, most = min(counts), max(counts)
    return f"{requests}, {f'{least} to ' if least < most else ''}{_counted(most, 'repeat')}"


def whole_requests(place: Place) -> int:
    return count_requests(place.workload, MODELS[place.model].num_requests)


def repeats(record: Record) -> dict[Cell, int]:
    """How often each cell was measured."""
    counts: dict[Cell, int] = {}
    for run in record.runs:
        counts[run.cell] = counts.get(run.cell, 0) + 1
    return counts


def shortfalls(record: Record) -> list[str]:
    """What lacks to a whole run, in sentences; nothing where all that ran is whole."""
    counts = repeats(record)
    found = []
    for place in dict.fromkeys(cell.place for cell in counts):
        if (served := record.num_requests(place)) != whole_requests(place):
            found.append(
                f"{', '.join(place)} was served with {served} of its {whole_requests(place)} requests."
            )
    few = sum(count < repeats_of(cell, REPEATS) for cell, count in counts.items())
    if few:
        found.append(f"{few} of {len(counts)} cells have fewer repeats than the {REPEATS} of a whole run.")
    if cut := len(record.cut_short):
        found.append(f"{cut} cell{'s were' if cut > 1 else ' was'} cut short.")
    return found


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
