"""An unusable model directory is refused with the file and the reason."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.checkpoint.check import check_directory, check_source
from engine.checkpoint.source import find_directory
from engine.checkpoint.weights import check_weights
from engine.errors import InvalidParameter, UnsupportedModel
from tests.engine.checkpoint.broken_checkpoints import (
    LFS_POINTER,
    Fault,
    both,
    config,
    cut,
    lengthened,
    pickled,
    removed,
    sharded,
    tensors,
    text,
)
from tests.tiny_models import save_model

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "sound")


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / "model")


def nothing(directory: Path) -> None:
    pass


@pytest.mark.parametrize(
    "change",
    [
        nothing,
        sharded,
        pickled,
        config(quantization_config={}),
        config(eos_token_id=None),
        text("README.md", ""),
        text("chat_template.jinja", "{{ messages }}"),
    ],
)
def test_a_valid_directory_passes(model: Path, change: Fault) -> None:
    change(model)
    check_directory(model)


def in_two_shards(directory: Path) -> None:
    """A third file of the index repeats tensors of the first."""
    sharded(directory)
    shutil.copy(directory / "model-1.safetensors", directory / "model-3.safetensors")
    index = directory / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["another"] = "model-3.safetensors"
    index.write_text(json.dumps(values))


def misplaced(directory: Path) -> None:
    sharded(directory)
    index = directory / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["lm_head.weight"] = "model-2.safetensors"
    index.write_text(json.dumps(values))


def dangling(name: str) -> Fault:
    def link(directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).symlink_to("../../blobs/0123")

    return link


def directory_instead(name: str) -> Fault:
    def change(directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).mkdir()

    return change


def without_offsets(directory: Path) -> None:
    header = b'{"a":{"dtype":"F32","shape":[2]}}'
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def with_header(header: bytes, num_bytes: int = 8) -> Fault:
    def change(directory: Path) -> None:
        content = len(header).to_bytes(8, "little") + header + bytes(num_bytes)
        (directory / "model.safetensors").write_bytes(content)

    return change


FAULTS: list[tuple[Fault, str]] = [
    (cut("model.safetensors", 1000), r"model.safetensors: is truncated: its header describes \d+ bytes, "),
    (lengthened("model.safetensors"), r"model.safetensors: is damaged: its header describes \d+ bytes, "),
    (text("model.safetensors", LFS_POINTER), "is a Git LFS pointer, not the file of 269060552 bytes"),
    (text("model.safetensors", ""), r"model.safetensors: is empty \(0 bytes\)"),
    (text("model.safetensors", "short"), "model.safetensors: is truncated or not a safetensors file"),
    (text("model.safetensors", "<!DOCTYPE html><html>Sign in</html>"), "is an HTML page, not the file"),
    (text("model.safetensors", "garbage " * 100), r"its header has \d+ bytes, the file 800"),
    (with_header(b"{"), "model.safetensors: is damaged: its header is not JSON"),
    (with_header(b"[]"), "its header must hold a JSON object, not list"),
    (without_offsets, "its header does not describe the tensor a"),
    (
        with_header(b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}'),
        "its header does not describe the tensor a",
    ),
    (
        with_header(b'{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,-8]}}'),
        "its header does not describe the tensor a",
    ),
    (
        with_header(b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,8]}}'),
        "its header does not describe the tensor a",
    ),
    (
        with_header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'),
        "the data of tensor a begins at 4, not 0",
    ),
    (
        with_header(b'{"a":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}}'),
        "tensor a has the unknown dtype F99",
    ),
    (
        with_header(
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
            b'"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
        ),
        "its header has the key 'a' twice",
    ),
    (dangling("model.safetensors"), "model.safetensors: is a link to ../../blobs/0123, which does not exist"),
    (directory_instead("model.safetensors"), "model.safetensors: is not a file"),
    (removed("model.safetensors"), "holds no weights .looked for model.safetensors, model.safetensors.index"),
    (
        both(removed("model.safetensors"), text("model-q4.gguf", "GGUF")),
        "holds no weights .*; it holds model-q4.gguf",
    ),
    (
        both(sharded, removed("model-2.safetensors")),
        "index.json: names 2 files, of which 1 are missing: model-2.safetensors",
    ),
    (both(sharded, cut("model-2.safetensors", 1)), "model-2.safetensors: is truncated"),
    (both(sharded, text("model-1.safetensors", LFS_POINTER)), "model-1.safetensors: is a Git LFS pointer"),
    (in_two_shards, r"model-1.safetensors and model-3.safetensors both hold .* and \d more"),
    (misplaced, "names tensors that are not in the file it names: lm_head.weight"),
    (
        both(sharded, text("model.safetensors.index.json", '{"weight_map": {"a": "x", "a": "y"}}')),
        "model.safetensors.index.json: has the key 'a' twice",
    ),
    (both(sharded, text("model.safetensors.index.json", "{}")), "index.json: has no weight_map"),
    (both(sharded, removed("*.index.json")), "holds no weights .*; it holds model-1.safetensors, model-2"),
    (both(pickled, cut("pytorch_model.bin", 100)), r"pytorch_model.bin: is truncated or damaged \(\d+ bytes"),
    (both(pickled, text("pytorch_model.bin", LFS_POINTER)), "pytorch_model.bin: is a Git LFS pointer"),
    (both(pickled, text("pytorch_model.bin", "no weights")), "neither a zip archive nor a pickle"),
    (text("config.json", ""), r"config.json: is empty"),
    (text("config.json", "{]"), "config.json: is not JSON: Expecting property name .* line 1 column 2"),
    (text("config.json", "[]"), "config.json: must hold a JSON object, not list"),
    (text("config.json", "{}"), "config.json: has no model_type"),
    (text("config.json", LFS_POINTER), "config.json: is a Git LFS pointer"),
    (text("config.json", "[" * 100_000), "config.json: is not usable JSON: it is nested too deeply"),
    (lambda one: (one / "config.json").write_bytes(b'{"\xff"'), r"is not UTF-8 text \(byte 2\)"),
    (removed("config.json"), "has no config.json, so it is not a model directory"),
    (
        both(removed("config.json"), text("adapter_config.json", '{"base_model_name_or_path": "o/base"}')),
        "holds a PEFT adapter, not a model; merge it into its base model o/base",
    ),
    (text("adapter_config.json", "{}"), "holds an adapter .*, which would not be applied"),
    (both(removed("config.json"), text("model_index.json", "{}")), "holds a diffusion pipeline"),
    (both(removed("config.json"), text("q4.gguf", "GGUF")), r"holds a GGUF file \(q4.gguf\)"),
    (text("generation_config.json", "{"), "generation_config.json: is not JSON"),
    (text("tokenizer.json", "{"), "tokenizer.json: is not JSON"),
    (text("tokenizer.json", ""), "tokenizer.json: is empty"),
    (text("tokenizer.json", "{}"), "tokenizer.json: has no `model`"),
    (cut("tokenizer.json", 100), "tokenizer.json: is not JSON"),
    (text("tokenizer_config.json", "[]"), "tokenizer_config.json: must hold a JSON object"),
    (dangling("tokenizer.json"), "tokenizer.json: is a link to"),
    (removed("tokenizer*"), "no tokenizer files in .*model .looked for tokenizer.json, tokenizer.model, "),
    (both(removed("tokenizer*"), text("vocab.json", "{}")), "vocab.json: exists without merges.txt"),
    (text("chat_template.jinja", ""), "chat_template.jinja: is empty"),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_an_error_names_the_file(model: Path, fault: Fault, message: str) -> None:
    """vmlx-swift#217, ComfyUI#13669: truncated files and LFS pointers ended in bare tracebacks."""
    fault(model)
    with pytest.raises(InvalidParameter, match=message) as raised:
        check_source(str(model))
    assert raised.value.field == "model"
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq"),
        ({"quant_method": "awq", "bits": 4, "version": "gemm"}, "awq"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "compressed-tensors"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": []}, "mxfp4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_algo": "NVFP4"}, "NVFP4"),
        ({"bits": 3}, "unnamed"),
    ],
)
def test_quantized_weights_are_refused_with_the_method(
    model: Path, quantization: dict[str, object], name: str
) -> None:
    config(quantization_config=quantization)(model)
    with pytest.raises(UnsupportedModel, match=rf"'llama': the weights in .* are quantized \({name}\)"):
        check_source(str(model))


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (config(compression_config={"format": "int"}), "compressed-tensors"),
        (config(quantization={"group_size": 64, "bits": 4}), "mlx"),
        (config(text_config={"quantization_config": {"quant_method": "hqq"}}), "hqq"),
        (text("quantize_config.json", "{}"), "gptq, according to quantize_config.json"),
        (text("hf_quant_config.json", "{}"), "modelopt, according to hf_quant_config.json"),
        (
            tensors(lambda found: {name: one.to(torch.float8_e4m3fn) for name, one in found.items()}),
            "lm_head.weight is stored as F8_E4M3",
        ),
        (
            tensors(lambda found: {**found, "lm_head.weight": found["lm_head.weight"].to(torch.int8)}),
            "lm_head.weight is stored as I8",
        ),
    ],
)
def test_quantized_weights_without_a_quantization_config_are_refused(
    model: Path, fault: Fault, name: str
) -> None:
    fault(model)
    with pytest.raises(UnsupportedModel, match=rf"are quantized \({name}\)"):
        check_source(str(model))


@pytest.mark.parametrize("source", ["./no/such/dir", "/x/y", "no/such/dir", "../nothing-here", "a b", ".x/"])
def test_a_path_is_not_a_hub_id(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidParameter, match=r"is neither an existing directory.* nor a hub id"):
        find_directory(source)


def test_paths_and_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert find_directory("~/owner") == tmp_path / "owner"
    assert find_directory("owner/name") == Path("owner/name")
    assert find_directory("owner/another") is None
    assert find_directory("gpt2") is None
    for source, message in {
        "": "must name a directory or a hub id",
        "~/m": "neither an existing directory nor",
        "~no-such-user/m": "this home directory is unknown",
    }.items():
        with pytest.raises(InvalidParameter, match=message):
            find_directory(source)


def test_files_and_broken_links_are_refused(model: Path) -> None:
    (model / "q4.gguf").write_text("GGUF")
    (model / "link").symlink_to("nowhere")
    for name, message in {
        "config.json": "config.json is a file; the setting takes the directory",
        "q4.gguf": "is a GGUF file, which is not served",
        "link": "is a link to nowhere, which does not exist",
        "config.json/x": "is neither an existing directory",
    }.items():
        with pytest.raises(InvalidParameter, match=message):
            find_directory(str(model / name))


def test_the_memory_of_loaded_weights(model: Path) -> None:
    """Known from the headers, before anything is loaded."""
    found = check_weights(model, {"model_type": "llama"})
    num_elements = sum(one.num_bytes for one in found.tensors.values()) // 4
    assert found.loaded_bytes(4) == found.num_bytes == 4 * num_elements
    assert found.loaded_bytes(2) == 2 * num_elements
    pickled(model)
    assert check_weights(model, {"model_type": "llama"}).loaded_bytes(4) >= 4 * num_elements


def test_the_check_imports_no_library(model: Path) -> None:
    """Importing torch takes seconds; a wrong path must be reported before."""
    code = (
        "import sys; from engine.checkpoint.check import check_source; check_source(sys.argv[1]);"
        "print(sorted({'torch', 'transformers', 'huggingface_hub', 'numpy'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(model)]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
