"""Plans of the library, and their runs on tensors."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import weakref

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


def _request(device: str, op: bytes, types, input_count, batch, seq, accumulate) -> Request:
    operands = (Operand * len(types))()
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

    def __init__(self, request: Request, operand_count: int):
        handle = ctypes.c_void_p()
        status = library().dw_plan_create(ctypes.byref(request), ctypes.byref(handle))
        if status:
            raise_last(status)
        self.handle = handle
        self.addresses = ctypes.c_void_p * operand_count
        self.workspace_bytes = library().dw_plan_workspace_bytes(handle)
        self.kernel = library().dw_plan_kernel(handle).decode()
        weakref.finalize(self, library().dw_plan_destroy, handle)

    def run(self, tensors: list[torch.Tensor], device: torch.device) -> None:
        """Runs the plan on tensors that fit it, in the current stream of their device."""
        addresses = self.addresses(*[tensor.data_ptr() for tensor in tensors])
        stream = None
        if device.type == "cuda":
            if device.index != torch.cuda.current_device():
                # The library makes the context of its device current; this gives it back.
                with torch.cuda.device(device):
                    return self.run(tensors, device)
            stream = torch.cuda.current_stream(device).cuda_stream
        workspace, size = None, self.workspace_bytes
        if size:
            # From PyTorch's allocator, so that its memory is reused in stream order.
            held = torch.empty(size, dtype=torch.uint8, device=device)
            workspace = held.data_ptr()
        status = library().dw_plan_run(self.handle, addresses, workspace, size, stream)
        if status:
            raise_last(status)


#: Functions that run a plan's work between measurements: ``watcher(kernel, work)``.
WATCHERS: list = []

_PLANS: dict[tuple, Plan | str] = {}


def encode(name: str, **attributes) -> bytes:
    """An op with its attributes, as the library reads it."""
    return json.dumps({"op": name, **attributes}, separators=(",", ":")).encode()


#: :func:`encode` of attributes without structure, which is remembered: it runs at every call.
op_text = functools.lru_cache(maxsize=None)(encode)


def plan(
    op: bytes,
    types: list[tuple[torch.dtype, tuple[int, ...]]],
    input_count: int,
    device: torch.device,
    batch: int = 1,
    seq: int = 1,
    accumulate: bool = False,
) -> Plan:
    """The plan of an op on operands of these types, inputs first. Plans are kept."""
    key = (op, tuple(types), input_count, device, batch, seq, accumulate)
    known = _PLANS.get(key)
    if known is None:
        request = _request(device_name(device), op, types, input_count, batch, seq, accumulate)
        try:
            known = Plan(request, len(types))
        except UnsupportedError as error:
            known = str(error)
        _PLANS[key] = known
    if isinstance(known, str):
        raise UnsupportedError(known)
    return known


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
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT_BYTES == 0 else tensor.clone()


def run(
    op: bytes,
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
    batch: int = 1,
    seq: int = 1,
) -> None:
    """Runs an op on tensors of one device. Outputs are new tensors, so they are aligned."""
    device = inputs[0].device
    inputs = [aligned(tensor) for tensor in inputs]
    tensors = [*inputs, *outputs]
    types = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    chosen = plan(op, types, len(inputs), device, batch, seq)
    if WATCHERS:
        WATCHERS[-1](chosen.kernel, lambda: chosen.run(tensors, device))
    else:
        chosen.run(tensors, device)
