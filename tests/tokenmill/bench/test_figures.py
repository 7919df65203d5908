"""Percentiles, throughput and goodput of loads that are known exactly; the report's page."""

from array import array
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tokenmill.bench.figures import distribution, figures
from tokenmill.bench.outcomes import Load, Outcome
from tokenmill.bench.page import report_page
from tokenmill.bench.prompts import Lengths, UnusablePrompts, from_file, synthetic
from tokenmill.bench.tables import figure_tables


def outcome(started: float, *times: float, tokens: int | None = None) -> Outcome:
    return Outcome(
        started, ended=times[-1], times=array("d", times), prompt_tokens=4, output_tokens=tokens or len(times)
    )


FAST, SLOW = outcome(0.0, 0.5, 1.0, 1.5), outcome(1.0, 3.0, 5.0, tokens=5)
BROKEN = Outcome(2.0, ended=2.5, error=("HTTP 429", "full"), lag=0.25)
LOAD = Load([FAST, SLOW, BROKEN], seconds=5.0, cpu_seconds=0.5)


def test_a_request_is_measured_from_its_start() -> None:
    assert (FAST.ttft, FAST.seconds, FAST.tpot, FAST.gaps) == (0.5, 1.5, 0.5, [0.5, 0.5])
    assert (SLOW.ttft, SLOW.tpot, SLOW.gaps) == (2.0, 0.5, [2.0])


def test_failed_requests_count_for_nothing_but_errors() -> None:
    found = figures(LOAD)
    assert found["requests"] == {"total": 3, "completed": 2, "failed": 1}
    assert found["tokens"] == {"prompt": 8, "output": 8, "chunks": 5, "counted_by": "server"}
    assert found["per_second"] == {"requests": 0.4, "output_tokens": 1.6, "total_tokens": 3.2}
    assert found["errors"] == [{"kind": "HTTP 429", "count": 1, "example": "full"}]
    assert found["generator"] == {"cpu_seconds": 0.5, "cpu_share": 0.1, "max_start_lag_seconds": 0.25}


def test_goodput_counts_requests_that_meet_every_objective() -> None:
    good = figures(LOAD, {"ttft": 1.0, "tpot": 0.6})["goodput"]
    assert (good["requests"], good["requests_per_second"], good["share"]) == (1, 0.2, 0.5)
    assert figures(LOAD, {"e2el": 4.0})["goodput"]["requests"] == 2
    assert figures(LOAD, {"tpot": 0.4})["goodput"]["requests"] == 0


def test_percentiles_are_interpolated() -> None:
    found = distribution([4.0, 1.0, 3.0, 2.0])
    assert found
    assert (found["p50"], found["mean"], found["max"]) == (2.5, 2.5, 4.0)
    assert found["p90"] == pytest.approx(3.7)
    assert distribution([]) is None


def test_a_load_without_any_success_has_a_report() -> None:
    nothing = Load([BROKEN], seconds=0.5, cpu_seconds=0.0)
    tables = figure_tables({"server": "s"}, figures(nothing, {"ttft": 1.0}))
    assert ["time to first token", *["-"] * 6] in tables[1]
    assert tables[2][1] == ["HTTP 429", "1", "full"]
    assert "<svg" in report_page("t", tables, nothing)


class Page(HTMLParser):
    """Collects the elements, and everything that a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [str(value) for name, value in attrs if name in ("src", "href", "xlink:href")]


def test_the_page_stands_alone_and_escapes_what_servers_say() -> None:
    bad = Outcome(0.0, ended=1.0, error=("<b>", "<script>"))
    load = Load([FAST, bad], seconds=2.0, cpu_seconds=0.0)
    parsed = Page()
    parsed.feed(report_page("a <i>", figure_tables({}, figures(load)), load))
    assert parsed.tags.count("svg") == 5
    assert parsed.loads == []
    assert not {"script", "b", "i", "link"} & set(parsed.tags)


def test_a_seed_gives_the_same_requests() -> None:
    def first(seed: int) -> list[object]:
        made = synthetic(seed=seed, input_lengths=Lengths(3, 9), output_lengths=Lengths(5, 7))
        return [next(made) for _ in range(200)]

    requests = first(1)
    assert requests == first(1) != first(2)
    made = synthetic(seed=1, input_lengths=Lengths(3, 9), output_lengths=Lengths(5, 7))
    sampled = [next(made) for _ in range(200)]
    assert {len(str(one.prompt).split()) for one in sampled} == set(range(3, 10))
    assert {one.max_tokens for one in sampled} == {5, 6, 7}


def test_a_file_has_text_or_json_and_is_repeated(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text(
        'Tell me.\n\n{"prompt": "Go on", "max_tokens": 2}\n{"messages": [{"role": "user", "content": "x"}]}\n'
    )
    prompts = from_file(file, max_tokens=9)
    found = [next(prompts) for _ in range(4)]
    assert [(one.prompt, one.max_tokens) for one in found] == [
        ("Tell me.", 9), ("Go on", 2), ([{"role": "user", "content": "x"}], 9), ("Tell me.", 9),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no prompt"), ("{", "line 1 is not JSON"), ('x\n{"a": 1}', "line 2 has neither"),
        ('{"prompt": "a", "max_tokens": 0}', '"max_tokens"'), ('{"prompt": 3}', "neither"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_refused_with_the_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "prompts"
    file.write_text(text)
    with pytest.raises(UnusablePrompts, match=words):
        from_file(file, max_tokens=9)
