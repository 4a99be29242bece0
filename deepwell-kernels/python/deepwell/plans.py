"""Plans of the library, and their runs on tensors."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import weakref
from array import array

import torch

from deepwell.library import (
    MAX_RANK,
    DeepwellError,
    Operand,
    Request,
    UnsupportedError,
    library,
    raise_last,
)

#: Alignment of every operand, in bytes.
ALIGNMENT_BYTES = 64

#: ``DwDType`` of each element type. Quantized data and scales are bytes in PyTorch; the operator
#: that makes them knows which of the two they are.
DTYPES = {
    torch.bfloat16: 0,
    torch.float32: 1,
    torch.int32: 2,
    torch.int64: 3,
    torch.uint64: 4,
    torch.bool: 5,
    torch.float8_e4m3fn: 6,
    torch.float8_e8m0fnu: 7,
}


#: Device of the library for CPU tensors: `cpu`, or `emulated:sm90` of a library with the emulator.
HOST_VARIABLE = "DEEPWELL_HOST_DEVICE"


def device_name(device: torch.device) -> str:
    """Name of a device in the library."""
    if device.type == "cpu":
        return os.environ.get(HOST_VARIABLE, "cpu")
    if device.type == "cuda":
        return f"cuda:{device.index or 0}"
    raise DeepwellError(f"expected tensors of a `cpu` or `cuda` device, got `{device}`")


def is_gpu(device: torch.device) -> bool:
    """Whether operators on a device run kernels of a GPU, emulated or not."""
    return device.type == "cuda" or os.environ.get(HOST_VARIABLE, "cpu") != "cpu"


def _request(
    device: str, op: bytes, types, input_count, batch, seq, accumulate, updated=()
) -> Request:
    operands = (Operand * len(types))()
    for index in updated:
        operands[index].updated = 1
    for operand, (dtype, shape) in zip(operands, types):
        if dtype not in DTYPES:
            raise UnsupportedError(f"expected BF16 or FP32, got {dtype}")
        if len(shape) > MAX_RANK:
            raise UnsupportedError(f"expected at most {MAX_RANK} dimensions, got {len(shape)}")
        operand.dtype, operand.rank = DTYPES[dtype], len(shape)
        operand.sizes[: len(shape)] = shape
    return Request(
        struct_bytes=ctypes.sizeof(Request),
        device=device.encode(),
        op=op,
        operands=operands,
        input_count=input_count,
        output_count=len(types) - input_count,
        batch=batch,
        seq=seq,
        accumulate=accumulate,
    )


class Plan:
    """A kernel for one op, device and shape."""

    def __init__(self, request: Request, device: torch.device):
        handle = ctypes.c_void_p()
        status = library().dw_plan_create(ctypes.byref(request), ctypes.byref(handle))
        if status:
            raise_last(status)
        #: The plan's address, as an integer: `ctypes` passes it on faster than an object.
        self.handle = handle.value
        self.device = device
        #: Index of a GPU; ``None`` on the CPU.
        self.index = (device.index or 0) if device.type == "cuda" else None
        self.workspace_bytes = library().dw_plan_workspace_bytes(handle)
        self.kernel = library().dw_plan_kernel(handle).decode()
        self.flops = library().dw_plan_flops(handle)
        self.run_plan = library().dw_plan_run
        weakref.finalize(self, library().dw_plan_destroy, handle)

    def run(self, tensors: list[torch.Tensor]) -> None:
        """Runs the plan on tensors that fit it, in the current stream of their device."""
        stream = None
        if self.index is not None:
            if self.index != _current_device():
                # The library makes the context of its device current; this gives it back.
                with torch.cuda.device(self.device):
                    return self.run(tensors)
            stream = _current_stream(self.index)
        addresses = array("Q", [tensor.data_ptr() for tensor in tensors])
        workspace, size = None, self.workspace_bytes
        if size:
            # From PyTorch's allocator, so that its memory is reused in stream order.
            held = _empty(size, dtype=torch.uint8, device=self.device)
            workspace = held.data_ptr()
        at = addresses.buffer_info()[0]
        status = self.run_plan(self.handle, at, workspace, size, stream)
        if status:
            raise_last(status)


_empty = torch.empty

# Functions below `torch.cuda.current_device` and `current_stream`, which take a microsecond each.
# A build of PyTorch for CPUs has none of them.
_current_device = getattr(torch._C, "_cuda_getDevice", None)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

#: Functions that run a plan's work between measurements: ``watcher(plan, work)``.
WATCHERS: list = []

#: Plans by op, device and inputs; a text is the reason why there is none.
_PLANS: dict[tuple, Plan | str] = {}


def encode(name: str, **attributes) -> bytes:
    """An op with its attributes, as the library reads it."""
    return json.dumps({"op": name, **attributes}, separators=(",", ":")).encode()


#: :func:`encode` of attributes without structure, which is remembered: it runs at every call.
op_text = functools.lru_cache(maxsize=None)(encode)


def whole(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor, as the library reads it."""
    return tuple(tensor.shape)


def rows(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor whose leading dimensions the library reads as one."""
    if tensor.dim() < 2:
        return tuple(tensor.shape)
    return tensor.shape[:-1].numel(), tensor.shape[-1]


def _make(op: bytes, tensors, input_count: int, batch: int, seq: int, shape_of) -> Plan | str:
    device = tensors[0].device
    types = [(tensor.dtype, shape_of(tensor)) for tensor in tensors]
    try:
        request = _request(device_name(device), op, types, input_count, batch, seq, False)
        return Plan(request, device)
    except UnsupportedError as error:
        return str(error)


def unsupported(device: str, op: bytes, types, input_count, batch=1, seq=1) -> str | None:
    """Why no kernel serves a request; ``None`` if one does. ``device`` may be an architecture,
    ``sm90`` for example, that is not here."""
    request = _request(device, op, types, input_count, batch, seq, False)
    status = library().dw_supported(ctypes.byref(request))
    if not status:
        return None
    try:
        raise_last(status)
    except UnsupportedError as error:
        return str(error)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as kernels read it: contiguous, and at a multiple of 64 bytes."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT_BYTES else tensor


def run(
    op: bytes,
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
    batch: int = 1,
    seq: int = 1,
    shape_of=whole,
) -> None:
    """Runs an op on tensors of one device, by a plan that is kept. Outputs are new tensors, so they
    are aligned; their types follow from the op and its inputs. ``shape_of`` gives the shape in
    which the library reads a tensor."""
    tensors = [
        aligned(t) if t.data_ptr() % ALIGNMENT_BYTES or not t.is_contiguous() else t for t in inputs
    ]
    shapes, dtypes = [t.shape for t in tensors], [t.dtype for t in tensors]
    key = (op, tensors[0].device, batch, seq, *shapes, *dtypes)
    tensors += outputs
    chosen = _PLANS.get(key)
    if chosen is None:
        chosen = _PLANS[key] = _make(op, tensors, len(inputs), batch, seq, shape_of)
    _run_chosen(chosen, tensors)


def run_in_place(
    op: bytes, inputs: list[torch.Tensor], outputs: list[torch.Tensor], updated: tuple[int, ...]
) -> None:
    """Runs an op that updates inputs, by a plan that is kept. Tensors are contiguous, at multiples
    of 64 bytes; ``updated`` has the indices of the inputs that are written."""
    tensors = [*inputs, *outputs]
    device = tensors[0].device
    key = (op, device, updated, *[(tensor.shape, tensor.dtype) for tensor in tensors])
    chosen = _PLANS.get(key)
    if chosen is None:
        types = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
        name, count = device_name(device), len(inputs)
        try:
            request = _request(name, op, types, count, 1, 1, False, updated)
            chosen = Plan(request, device)
        except UnsupportedError as error:
            chosen = str(error)
        _PLANS[key] = chosen
    _run_chosen(chosen, tensors)


def _run_chosen(chosen: Plan | str, tensors: list[torch.Tensor]) -> None:
    if isinstance(chosen, str):
        raise UnsupportedError(chosen)
    if WATCHERS:
        WATCHERS[-1](chosen, lambda: chosen.run(tensors))
    else:
        chosen.run(tensors)
