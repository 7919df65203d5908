"""The fastest attention that is available is used; otherwise torch's, with one warning."""

import logging
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.errors import InvalidParameter, UnsupportedModel
from engine.execution.attention.interface import AttentionBackend, Backend
from engine.execution.attention.native_backend import AttentionOperator, NativeCall
from engine.execution.attention.native_self_check import check_operator
from engine.execution.build import build_execution
from engine.execution.loading import attention_backends
from engine.execution.loading.attention_backends import TORCH, choose_backends
from engine.execution.machine import native_build, native_library
from engine.execution.machine.native_build import CannotBuild, build, built_library, find_compiler
from tests.engine.execution.pools import ROOT
from tests.engine.execution.pools import native_library as compiled

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def names(
    attention: str, cache: Path | None, device: torch.device = CPU, deterministic: bool = False
) -> list[str]:
    chosen = choose_backends(
        attention,
        deterministic=deterministic,
        device=device,
        library=native_library.find_library(cache, lambda _: None),
    )
    return [backend.name for backend in chosen]


def test_native_goes_first_on_a_cpu() -> None:
    cache = ROOT / ".tokenmill"
    assert names("auto", cache) == ["native", "torch"]
    assert names("native", cache) == ["native"]
    assert names("torch", cache) == ["torch"]


def test_triton_goes_first_on_cuda(caplog: pytest.LogCaptureFixture) -> None:
    assert names("auto", None, CUDA) == ["triton", "torch"]
    assert names("triton", None, CUDA) == ["triton"]
    assert not caplog.records


def test_without_triton_torch_is_used_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "engine.execution.attention.triton_backend", None)
    assert names("auto", None, CUDA) == ["torch"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "triton_backend" in record.getMessage()
    with pytest.raises(InvalidParameter, match=r"attention: triton is not available: .*triton_backend"):
        names("triton", None, CUDA)


@pytest.mark.parametrize(
    ("attention", "device", "deterministic", "reason"),
    [
        ("fast", CPU, False, "must be auto, torch, native"),
        ("native", CUDA, False, "native runs on cpu, not on cuda"),
        ("triton", CPU, False, "triton runs on cuda, not on cpu"),
        ("native", CPU, True, "deterministic mode has its own"),
        ("triton", CUDA, True, "deterministic mode has its own"),
    ],
)
def test_an_unavailable_backend_is_refused(
    attention: str, device: torch.device, deterministic: bool, reason: str
) -> None:
    with pytest.raises(InvalidParameter, match=f"attention: .*{reason}"):
        names(attention, None, device, deterministic)


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")


def test_without_a_compiler_torch_is_used_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_compiler(monkeypatch)
    assert names("auto", tmp_path) == ["torch"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "no C++ compiler was found (CXX is '/nowhere/c++')" in record.getMessage()
    with pytest.raises(InvalidParameter, match="attention: native is not available: no C"):
        names("native", tmp_path)


def test_a_compiler_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "c++"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\nfor last; do :; done\n'
        'echo half > "$last"; echo "out of cheese"; exit 3\n'
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(CannotBuild, match="failed with 3: out of cheese"):
        built_library(tmp_path / "cache", lambda _: None)
    assert list((tmp_path / "cache" / "native").iterdir()) == []


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotBuild, match="cannot be written"):
        built_library(tmp_path / "file", lambda _: None)


def fake_compiler(directory: Path, monkeypatch: pytest.MonkeyPatch, waits_for: int = 1) -> None:
    """Copies the compiled library. Ends once `waits_for` compilers have begun."""
    compiled()
    (library,) = sorted((ROOT / ".tokenmill" / "native").glob("*.so"), key=os.path.getmtime)[-1:]
    compiler = directory / "c++"
    begun = directory / "begun"
    begun.mkdir()
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit 0\nfor last; do :; done\n: > "{begun}/$$"\n'
        f'while [ "$(ls "{begun}" | wc -l)" -lt {waits_for} ]; do sleep 0.05; done\ncp "{library}" "$last"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))


BUILD = "import sys, pathlib; from engine.execution.machine.native_build import built_library as built; "
BUILD += "print(built(pathlib.Path(sys.argv[1]), lambda _: None))"


def test_two_processes_build_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither compiler ends before both have begun, so each process finds the cache empty."""
    fake_compiler(tmp_path, monkeypatch, waits_for=2)
    command = [sys.executable, "-c", BUILD, str(tmp_path / "cache")]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        found = {Path(process.communicate(timeout=120)[0].strip()) for process in running}
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0]
    assert len(list((tmp_path / "begun").iterdir())) == 2
    (library,) = found
    assert list(library.parent.iterdir()) == [library]
    native_library.NativeLibrary(library)


def another_cpu(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "cpuinfo").write_text("model name : another\nflags : sse2\n")
    monkeypatch.setattr(native_build, "_CPUINFO", directory / "cpuinfo")


def other_flags(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "FLAGS", (*native_build.FLAGS, "-g"))


def other_sources(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = Path(shutil.copytree(native_build.SOURCES, directory / "sources"))
    with (copied / "vectors.h").open("a") as source:
        source.write("// changed\n")
    monkeypatch.setattr(native_build, "SOURCES", copied)


def another_compiler(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = directory / "other-c++"
    shutil.copy(directory / "c++", compiler)
    monkeypatch.setenv("CXX", str(compiler))


def another_version(directory: Path, _: pytest.MonkeyPatch) -> None:
    compiler = directory / "c++"
    compiler.write_text(compiler.read_text().replace("&& exit 0", "&& echo 13.1 && exit 0"))


@pytest.mark.parametrize(
    "change", [another_cpu, other_flags, other_sources, another_compiler, another_version]
)
def test_the_library_is_built_once_and_again_for_other_inputs(
    change: Callable[[Path, pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(tmp_path, monkeypatch)
    lines: list[str] = []
    first = built_library(tmp_path, lines.append)
    assert built_library(tmp_path, lines.append) == first
    assert len(lines) == 1
    change(tmp_path, monkeypatch)
    assert built_library(tmp_path, lines.append) != first
    assert len(lines) == 2


def test_a_damaged_file_is_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(tmp_path, monkeypatch)
    path = built_library(tmp_path, lambda _: None)
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1
    for content in (whole[: len(whole) // 2], whole[:-1], bytes(damaged), b""):
        path.unlink()
        path.write_bytes(content)
        lines: list[str] = []
        native_library.load_library(tmp_path, lines.append)
        assert "is damaged; compiling it again" in lines[0]
        assert path.read_bytes() == whole


def test_a_library_that_cannot_be_loaded_is_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(tmp_path, monkeypatch)
    path = built_library(tmp_path, lambda _: None)
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(b"\x7fELF of another machine")
    native_build.seal(path)
    lines: list[str] = []
    native_library.load_library(tmp_path, lines.append)
    assert "cannot be loaded" in lines[0]
    assert path.read_bytes() == whole


def test_a_compiler_without_output(tmp_path: Path) -> None:
    idle = shutil.which("true")
    assert idle is not None
    with pytest.raises(CannotBuild, match="made no library"):
        build(idle, tmp_path / "native" / "x.so", lambda _: None)


def test_the_compiler_is_found_by_its_usual_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    assert Path(find_compiler()).name in native_build.COMPILERS


@pytest.mark.parametrize(
    "mistake", [{"window": 0}, {"softcap": 0.0}, {"sinks": None}, {"scaling": 0.29}, {"scaling": math.nan}]
)
@pytest.mark.parametrize("dtype", native_library.DTYPES)
def test_the_self_check_of_the_library_detects_an_error(
    dtype: torch.dtype, mistake: dict[str, object]
) -> None:
    class Mistaken(AttentionOperator):
        def forward(self, dtype_of_call: torch.dtype, call: NativeCall) -> None:
            for field, value in mistake.items() if dtype_of_call == dtype else ():
                setattr(call, field, value)
            super().forward(dtype_of_call, call)

    with pytest.raises(CannotBuild, match=f"disagrees with torch by .* in {dtype}"):
        check_operator(Mistaken(compiled()))


def test_an_operator_that_computes_wrongly_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(_library: object) -> None:
        raise CannotBuild("what was compiled disagrees with torch")

    monkeypatch.setattr(attention_backends, "check_operator", wrong)
    assert names("auto", ROOT / ".tokenmill") == ["torch"]
    assert "disagrees with torch" in caplog.text


def test_a_backend_that_fails_the_self_check_is_replaced(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> AttentionBackend:
        raise UnsupportedModel("heads of a strange size")

    native = Backend("native", refuse, TORCH.bytes_per_block)
    monkeypatch.setattr(attention_backends, "native_backend", lambda *_: native)
    lines: list[str] = []
    execution = build_execution(
        str(tiny_llama), device="cpu", num_kv_blocks=4, cache_dir="/nowhere", progress=lines.append
    )
    assert execution.attention == "torch"
    assert "attention: torch" in lines
    assert "native attention is not used for this model" in caplog.text
    with pytest.raises(UnsupportedModel, match="heads of a strange size"):
        build_execution(
            str(tiny_llama), device="cpu", num_kv_blocks=4, cache_dir="/nowhere", attention="native"
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_is_served_by_the_native_attention(tiny_llama: Path, dtype: str) -> None:
    execution = build_execution(
        str(tiny_llama), device="cpu", dtype=dtype, num_kv_blocks=4, cache_dir=ROOT / ".tokenmill"
    )
    assert execution.attention == "native"
