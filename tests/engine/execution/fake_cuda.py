"""A CUDA device that computes nothing: fake tensors on `cuda:0`, on any machine and any build of torch.

The code under test runs unchanged, but no kernel runs. `WaitLedger` lists what would make the host wait for
the device, `KernelVariants` the variants of Triton kernels that would be compiled. The device guard is
replaced for the whole process, so this module needs its own process.

Not detected: waits inside torch's operators, and anything that depends on the values of tensors.
"""

import ctypes
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from engine.execution.attention import triton_launch
from engine.execution.attention.interface import ATTENTION_NAME, install

DEVICE = torch.device("cuda", 0)
CAPABILITY = (9, 0)
_READS = frozenset(
    f"aten::{name}"
    for name in (
        "_local_scalar_dense", "item", "nonzero", "is_nonzero", "masked_select", "equal", "unique_dim",
        "_unique2", "unique_consecutive", "bincount", "repeat_interleave",
    )
)  # fmt: skip
"""Operators whose result or shape the host must know."""


class Wait(NamedTuple):
    """`what` makes the host wait; `where`: file and line of the innermost frame outside of torch."""

    what: str
    where: str


class RealHost(TorchDispatchMode):
    """Runs operators on host tensors with real values, which steps are planned with."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        # Pinning needs a driver.
        kwargs.pop("pin_memory", None)
        if any(map(_is_on_device, tree_leaves((args, kwargs)))):
            args, kwargs = tree_map_only(torch.Tensor, self._as_fake, (args, kwargs))
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)


def _is_on_device(given: Any) -> bool:
    if isinstance(given, torch.device):
        return given.type == "cuda"
    return isinstance(given, FakeTensor)


class FakeEvent:
    """Replaces `torch.cuda.Event`."""

    def record(self) -> None:
        """Nothing to record."""

    def synchronize(self) -> None:
        raise AssertionError("the host waits for an event")


class WaitLedger(TorchDispatchMode):
    """Lists the operators that make the host wait for the device.

    A copy between host and device does not wait if it is `non_blocking` and the host's side is pinned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[Wait] = []
        self._pinned: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = {one.name: value for one, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        if what := self._reason(func._schema.name, given):
            self.waits.append(Wait(what, _place()))
        result = func(*args, **kwargs)
        if kwargs.get("pin_memory"):
            self._pinned.append(StorageWeakRef(result.untyped_storage()))
        return result

    def _reason(self, name: str, given: dict[str, Any]) -> str | None:
        if name == "aten::copy_":
            return self._copy(given["src"], given["self"].device, given, target=given["self"])
        if name in ("aten::_to_copy", "aten::to"):
            device = given.get("device")
            device = getattr(given.get("other"), "device", None) if device is None else torch.device(device)
            return None if device is None else self._copy(given["self"], device, given)
        if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
            return self._index(given["self"], given["indices"], given.get("values"))
        first = next((one for one in given.values() if isinstance(one, torch.Tensor)), None)
        if name == "aten::repeat_interleave" and not isinstance(given.get("repeats"), torch.Tensor):
            return None
        if name in _READS and first is not None and first.device.type == "cuda":
            return f"{name} on the device"
        return None

    def _copy(
        self,
        source: torch.Tensor,
        device: torch.device,
        given: dict[str, Any],
        target: torch.Tensor | None = None,
    ) -> str | None:
        if source.device.type == device.type:
            return None
        direction = f"{source.device.type} to {device.type}"
        on_host = source if source.device.type == "cpu" else target
        if not given.get("non_blocking"):
            return f"blocking copy from {direction}"
        if on_host is None or not self._is_pinned(on_host):
            return f"copy of pageable memory from {direction}"
        return None

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        storage = StorageWeakRef(tensor.untyped_storage())
        return any(one == storage for one in self._pinned)

    def _index(
        self, tensor: torch.Tensor, indices: list[torch.Tensor | None], values: torch.Tensor | None
    ) -> str | None:
        if tensor.device.type != "cuda":
            return None
        if values is not None and values.device.type == "cpu":
            # Also a number, which torch copies to the device.
            return "values on the host"
        if any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in indices):
            return "boolean index"
        if any(one is not None and one.device.type == "cpu" for one in indices):
            return "index on the host"
        return None


def _place() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "torch" not in path.parts and path != Path(__file__):
            return f"{path.parent.name}/{path.name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


@dataclass(frozen=True)
class _Pointer:
    """The properties of a tensor by which Triton chooses a variant. Allocations are aligned to 512 bytes."""

    dtype: torch.dtype
    at: int

    def data_ptr(self) -> int:
        return self.at

    @classmethod
    def of(cls, given: Any) -> Any:
        if not isinstance(given, torch.Tensor):
            return given
        if given.device.type != "cuda":
            raise AssertionError(f"a kernel gets a tensor on {given.device}")
        return cls(given.dtype, 512 + int(given.storage_offset()) * given.element_size())


class KernelVariants:
    """Replaces the Triton kernels: launches nothing and lists each variant once.

    Triton decides which launches share a variant.
    """

    def __init__(self) -> None:
        self.variants: list[str] = []
        self.launches = 0

    def _kernel(self, kernel: Any) -> Any:
        variants = self

        class AsyncExecutor:
            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                def launch(*args: Any, **named: Any) -> None:
                    variants.launches += 1
                    given = {name: _Pointer.of(value) for name, value in named.items()}
                    kernel.warmup(*map(_Pointer.of, args), grid=grid, **given)

                return launch

        return AsyncExecutor()

    @contextmanager
    def installed(self) -> Iterator["KernelVariants"]:
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        names = ("store_kernel", "attend_kernel", "split_kernel", "combine_kernel")
        kernels = {name: getattr(triton_launch, name) for name in names}
        compiling = JITFunction._do_compile

        def compile_nothing(kernel: Any, key: Any, _: Any, device: Any, *others: Any) -> object:
            self.variants.append(f"{kernel.fn.__name__} {key}")
            return kernel.device_caches[device][0].setdefault(key, object())

        driver.set_active(_triton_driver())
        JITFunction._do_compile = compile_nothing
        for name, kernel in kernels.items():
            kernel.device_caches.clear()
            setattr(triton_launch, name, self._kernel(kernel))
        try:
            yield self
        finally:
            JITFunction._do_compile = compiling
            for name, kernel in kernels.items():
                setattr(triton_launch, name, kernel)


def _triton_driver() -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Driver(DriverBase):  # type: ignore[misc]  # untyped in Triton
        """A driver without a GPU, with the methods that choose a variant."""

        def __init__(self) -> None:
            """Without the base class, which looks for a device."""

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        get_active_torch_device = get_benchmarker = None

    return Driver()


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Tensors on `DEVICE` are fake. Once per process."""
    if not triton_launch.IS_COMPILED:
        raise RuntimeError("TRITON_INTERPRET must not be set")
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory, "fake_cuda_guard.so")
        torch_directory = Path(torch.__file__).parent
        subprocess.run(
            [
                "c++", "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch_directory / 'include'}",
                str(Path(__file__).with_name("fake_cuda_guard.cpp")), "-o", str(library),
                f"-L{torch_directory / 'lib'}", "-lc10",
            ],
            check=True,
        )  # fmt: skip
        ctypes.CDLL(str(library))
    torch.cuda.Event = FakeEvent  # type: ignore[assignment, misc]  # needs a device
    torch.cuda.get_device_capability = lambda *_: CAPABILITY
    install()
    with FakeTensorMode() as fake, RealHost(fake), torch.inference_mode():
        yield


def fake_model(config: PretrainedConfig, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """A model of `config` whose weights are on `DEVICE`. Only under the mode of `fake_cuda`."""
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model: PreTrainedModel = auto.from_config(config, attn_implementation=ATTENTION_NAME, dtype=dtype)
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                there = torch.empty(weight.shape, dtype=weight.dtype, device=DEVICE)
                module._parameters[name] = torch.nn.Parameter(there, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=DEVICE)
    model.eval()
    return model
