"""Which Triton kernels a server on an H200 would compile, found without a GPU.

Everything above the launches runs as it is, with tensors in host memory that say they are on a CUDA device. A launch
works out the key under which Triton keeps a compiled kernel, alignment of pointers included, and goes no further; CUDA
launchers and cuBLAS do nothing.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.runtime import driver, jit

from rose.config.cache import CacheConfig
from rose.config.engine import EngineConfig
from rose.config.quant import QuantConfig
from rose.engine.engine import LLMEngine
from rose.kernels import dependent, registry
from rose.kernels.ahead import Facts, Listed
from rose.kernels.build import CudaLibrary
from rose.layers.build import LayerBuild
from rose.models.gpt_oss.checkpoints import configuration
from rose.models.gpt_oss.model import GptOss
from rose.models.gpt_oss.weights import blank
from rose.protocol.sampling_params import SamplingParams
from rose.runtime.ahead import list_facts
from rose.runtime.graphs import DecodeGraphs, GraphKey
from rose.runtime.memory import MemoryUse
from rose.runtime.plan import PlanEntry, StepPlan
from rose.utils.device import H200


class Keys(set[tuple[str, str]]):
    """Kernel and what it is specialised for."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: dict[Listed, None] = {}
        """The same as a list of kernels to be compiled ahead has it, in order."""


_LAUNCH: Any = jit.JITFunction.run
_IS_CUDA = Tensor.is_cuda.__get__  # a new object at every look
_PRODUCTS = (torch.mm, torch.addmm, Tensor.mm, Tensor.addmm)
_EMPTY = (torch.empty, torch.empty_like, Tensor.new_empty)


class HostAsDevice(TorchFunctionMode):
    """Tensors of a CUDA device in host memory: made where asked for, never pinned, products left out."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == _IS_CUDA:
            return args[0].device.type == "cpu"
        if func in _PRODUCTS:
            out = kwargs.get("out")
            return args[0].new_empty(len(args[-2]), args[-1].shape[1]) if out is None else out
        if func is Tensor.pin_memory:
            return args[0]
        if "device" in kwargs and kwargs["device"] is not None:
            device = torch.device(kwargs["device"])
            kwargs["device"] = "cpu" if device.type == "cuda" else device
        if func is Tensor.to:
            args = tuple("cpu" if _is_cuda(a) else a for a in args)
        kwargs.pop("pin_memory", None)
        if func is torch.zeros and kwargs.get("dtype", torch.float32).is_floating_point:
            func = torch.empty  # pages of gigabytes, which nothing reads
        made = func(*args, **kwargs)
        if func in _EMPTY and not made.is_floating_point():
            made.zero_()  # tokens that nothing sampled are read as ids
        return made


def _is_cuda(value: Any) -> bool:
    return isinstance(value, str | torch.device) and torch.device(value).type == "cuda"


class _NoDriver:
    """What Triton asks of a driver in order to name a kernel."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


class _NoEvent:
    def record(self) -> None: ...
    def synchronize(self) -> None: ...


class _NoStream:
    cuda_stream = 0


@contextmanager
def recording() -> Iterator[Keys]:
    """Make launches record and nothing else; yield the set that they add to.

    HAZARD: changes Triton and torch for the whole process while it lasts.
    """
    found = Keys()

    def run(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        del warmup
        assert all(n > 0 for n in grid), f"{function} is launched on an empty grid"
        binder = function.device_caches[0][4]
        _, specialization, options = binder(*args, **kwargs)
        names = [p.name for p in function.params]
        words = [
            f"{n}={v}" if t == "constexpr" else f"{n}:{t}{'' if v is None else v or '-'}"
            for n, (t, v) in zip(names, specialization, strict=True)
        ]
        words += [f"{k}={v}" for k, v in options.items()]
        name = f"{function.fn.__module__.removeprefix('rose.kernels.')}.{function.fn.__name__}"
        found.add((name, " ".join(words)))
        found.listed[Listed.of(function, specialization, options)] = None

    old = driver._active
    with ExitStack() as stack:
        patch: Callable[..., Any] = lambda *a: stack.enter_context(mock.patch.object(*a))  # noqa: E731
        patch(jit.JITFunction, "run", run)
        patch(CudaLibrary, "launcher", lambda *_: lambda *_: None)
        # Bytes of a workspace.
        patch(CudaLibrary, "number", lambda *_: lambda *_: 1024)
        patch(CudaLibrary, "refusal", lambda _: None)
        patch(CudaLibrary, "build", lambda _: None)
        patch(torch.cuda, "Event", _NoEvent)
        patch(torch.cuda, "synchronize", lambda *_: None)
        patch(torch.cuda, "current_stream", lambda *_: _NoStream())
        stack.enter_context(
            mock.patch("torch._C._cuda_getCurrentRawStream", return_value=0, create=True)
        )
        patch(dependent, "_has_instructions", lambda: True)
        driver.set_active(_NoDriver())
        stack.callback(setattr, driver, "_active", old)
        # Launchers are made at import.
        for name in registry.operation_names():
            registry.load(name)
        from rose.kernels.attention_prefill import cuda_impl
        from rose.kernels.moe_experts import cuda_decode_calls

        patch(cuda_decode_calls, "num_multiprocessors", lambda _: 132)
        patch(cuda_impl, "num_multiprocessors", lambda _: 132)
        stack.enter_context(HostAsDevice())
        yield found


def compile_only(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Compile what a launch would need, for sm_90a; inside `recording`."""
    return _LAUNCH(function, *args, **{**kwargs, "grid": None, "warmup": True})


class _RunGraphs(DecodeGraphs):
    """Captures by running once more; a replay launches nothing that its capture did not."""

    def _capture(self, key: GraphKey) -> tuple[Any, Any]:
        return mock.Mock(), self._step(key.num_rows, key.max_length, key.flavour)


def engine(size: str = "20b", *, quant: dict[str, str] | None = None, **changes: Any) -> LLMEngine:
    """Return a warmed-up engine of an H200; inside `recording`.

    Three layers: one with a window, one without, and the last, which takes the rows that sample alone.
    """
    asked = EngineConfig(
        model=size,
        device="cuda",
        quant=QuantConfig(**{"weights": "mxfp4", **(quant or {})}),
        cache=CacheConfig(kv_tokens=1 << 17),
    )
    asked = dataclasses.replace(asked, **changes)
    config = asked.resolve(H200, checkpoint_format="mxfp4")
    model_config = configuration(size, num_layers=3)
    parameters = _in_memory(blank(model_config, config.quant))
    model = GptOss(
        model_config,
        parameters,
        build=LayerBuild(quant=config.quant, device=H200, kernels=config.kernels),
        page_tokens=config.cache.page_tokens,
        num_positions=16,
    )
    with ExitStack() as stack:
        stack.enter_context(mock.patch("rose.engine.engine.detect", return_value=H200))
        stack.enter_context(mock.patch("rose.runtime.assemble._measure", return_value=MemoryUse()))
        stack.enter_context(mock.patch("rose.decoders.plain.DecodeGraphs", _RunGraphs))
        return LLMEngine.from_model(model, asked)


def list_of(size: str, quant: dict[str, str]) -> tuple[Facts, list[Listed]]:
    """Return what a start of the default configuration launches, and of what that is the list."""
    with recording() as found:
        made = engine(size, quant=quant)
        at_start = list(found.listed)
    assert made.quant is not None, "an engine knows its formats"
    return list_facts(configuration(size), made.quant), at_start


def serving_steps(
    num_slots: int, context_tokens: int, *, count: int, seed: int = 0
) -> Iterator[StepPlan]:
    """Yield steps that serving may take: any number of decoding sequences beside prompts, whole, begun and ended."""
    source = random.Random(seed)

    def below(most: int) -> int:
        """Small numbers as likely as large ones."""
        return source.randrange(1 << source.randint(1, most.bit_length() - 1))

    for i in range(count):
        num_decode = below(num_slots) if i % 2 else source.randint(0, num_slots - 1)
        num_prompts = min(source.choice((1, 1, 2, 3, 16)), num_slots - num_decode)
        most = 1 + below(1 << 14)
        chunks = [
            (below(context_tokens // 2), 1 + source.randrange(most) // num_prompts)
            for _ in range(num_prompts)
        ]
        yield serving_step(num_decode, 2 + below(context_tokens // 2), chunks, is_cut=i % 3 == 0)
    for num_decode in range(1, num_slots + 1):
        yield serving_step(num_decode, 2 + below(context_tokens // 2), [])


def serving_step(
    num_decode: int, length: int, chunks: list[tuple[int, int]], *, is_cut: bool = False
) -> StepPlan:
    """Return a step of sequences of one length beside (first position, tokens) of prompts, the last cut or not."""
    decode = [PlanEntry.decode(slot, position=length - 1) for slot in range(num_decode)]
    top_p = 0.9 if length % 3 == 0 else 1.0
    prefill = [
        PlanEntry(
            slot=slot,
            is_new=True,
            start_position=start,
            token_ids=[0] * num_tokens,
            num_tokens=num_tokens,
            is_last_chunk=True,
            sampling=SamplingParams(seed=0, top_p=top_p),
        )
        for slot, (start, num_tokens) in enumerate(chunks, start=num_decode)
    ]
    if prefill and is_cut:
        prefill[-1].is_last_chunk = False
    longest = [start + num_tokens for start, num_tokens in chunks]
    slots = [entry.slot for entry in decode + prefill if entry.is_last_chunk]
    return StepPlan(
        step=-1,
        decode=decode,
        prefill=prefill,
        sample_slots=slots,
        max_length=max([length] * bool(decode) + longest),
        masks={slots[0]: b"\xff" * 4} if slots and length % 5 == 0 else {},
    )


def late_kernels(
    count: int, spoil: Callable[[LLMEngine], None] = lambda _: None, **choices: Any
) -> dict[str, Any]:
    """Return how many kernels the start of an engine compiles, and which ones serving would compile later.

    Also how many of these the engine counts, once Triton says that it has compiled one.
    """
    with recording() as found:
        served = engine(**choices)
        at_start = set(found)
        spoil(served)
        scheduler = served.scheduler.config
        steps = serving_steps(scheduler.max_sequences, served.limits.context_tokens, count=count)
        for plan in steps:
            if plan.num_tokens <= scheduler.step_tokens:
                served.decoder.collect(served.decoder.launch(plan))
        late = sorted(found - at_start)
        hooks: Any = knobs.runtime
        hooks.jit_post_compile_hook(key="", fn=mock.Mock())
        counted = served.status().num_late_kernels
        return {"at_start": len(at_start), "late": late, "counted": counted}


def _in_memory(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype)
    if isinstance(value, tuple):
        return tuple(map(_in_memory, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **{k: _in_memory(v) for k, v in fields.items()})
    return value
