"""Finds ``libdeepwell.so``, loads it, and gives its functions types and errors."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

#: Version of the interface of plans that this package is written for.
ABI_VERSION = 3

#: Path of another library than the one in the package.
LIBRARY_VARIABLE = "DEEPWELL_LIBRARY"
#: Folder of compiled kernels, which the library reads.
KERNELS_VARIABLE = "DEEPWELL_KERNELS_DIR"

MAX_RANK = 8
STATUS_UNSUPPORTED = 3


class DeepwellError(RuntimeError):
    """A call of the library failed."""


class UnsupportedError(DeepwellError):
    """No kernel serves a request. The message has the reason of each kernel."""


class Operand(ctypes.Structure):
    """``DwOperand`` of ``deepwell.h``."""

    _fields_ = [
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("updated", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("sizes", ctypes.c_int64 * MAX_RANK),
    ]


class Request(ctypes.Structure):
    """``DwRequest`` of ``deepwell.h``."""

    _fields_ = [
        ("struct_bytes", ctypes.c_size_t),
        ("device", ctypes.c_char_p),
        ("op", ctypes.c_char_p),
        ("operands", ctypes.POINTER(Operand)),
        ("input_count", ctypes.c_int32),
        ("output_count", ctypes.c_int32),
        ("batch", ctypes.c_int64),
        ("seq", ctypes.c_int64),
        ("accumulate", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


def _path() -> Path:
    chosen = os.environ.get(LIBRARY_VARIABLE)
    path = Path(chosen) if chosen else Path(__file__).with_name("libdeepwell.so")
    if not path.is_file():
        raise DeepwellError(
            f"libdeepwell.so: expected a file at {path}, found none\n"
            f"hint: install the wheel of deepwell, or set {LIBRARY_VARIABLE} to a library built by "
            "`cargo build --release --package deepwell-capi`"
        )
    return path


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library, with the types of its functions."""
    path = _path()
    kernels = path.with_name("kernels")
    if kernels.is_dir():
        os.environ.setdefault(KERNELS_VARIABLE, str(kernels))
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise DeepwellError(f"{path}: the library does not load: {error}") from error
    loaded.dw_abi_version.restype = ctypes.c_uint32
    version = loaded.dw_abi_version()
    if version < ABI_VERSION:
        raise DeepwellError(
            f"{path}: expected interface version {ABI_VERSION} or newer, got {version}\n"
            f"hint: install a newer library, or unset {LIBRARY_VARIABLE}"
        )
    pointer = ctypes.c_void_p
    loaded.dw_last_error.restype = ctypes.c_char_p
    loaded.dw_supported.argtypes = [ctypes.POINTER(Request)]
    loaded.dw_plan_create.argtypes = [ctypes.POINTER(Request), ctypes.POINTER(pointer)]
    loaded.dw_plan_destroy.argtypes = [pointer]
    loaded.dw_plan_destroy.restype = None
    loaded.dw_plan_workspace_bytes.argtypes = [pointer]
    loaded.dw_plan_workspace_bytes.restype = ctypes.c_size_t
    loaded.dw_plan_kernel.argtypes = [pointer]
    loaded.dw_plan_kernel.restype = ctypes.c_char_p
    loaded.dw_plan_flops.argtypes = [pointer]
    loaded.dw_plan_flops.restype = ctypes.c_uint64
    # The operands are the address of an array: `ctypes` takes a plain number fastest.
    loaded.dw_plan_run.argtypes = [pointer, pointer, pointer, ctypes.c_size_t, pointer]
    return loaded


def raise_last(status: int) -> None:
    """Raises the error of the last call of this thread."""
    message = library().dw_last_error().decode()
    raise (UnsupportedError if status == STATUS_UNSUPPORTED else DeepwellError)(message)


def is_available() -> tuple[bool, str]:
    """Whether Deepwell's kernels run on a GPU of this machine, and the reason if they do not."""
    try:
        import torch
    except ImportError as error:
        return False, f"PyTorch is missing: {error}\nhint: pip install 'torch >= 2.10'"
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < (2, 10):
        return False, f"expected PyTorch 2.10 or newer, got {torch.__version__}"
    if not torch.cuda.is_available():
        return False, "PyTorch sees no GPU"
    capability = torch.cuda.get_device_capability()
    if capability not in [(9, 0), (10, 0), (10, 3), (12, 0)]:
        major, minor = capability
        return False, (
            "expected a GPU of compute capability 9.0, 10.0, 10.3 or 12.0, "
            f"got {torch.cuda.get_device_name()} with {major}.{minor}"
        )
    try:
        library()
    except DeepwellError as error:
        return False, str(error)
    return True, ""
