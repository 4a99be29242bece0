"""``deepwell.capture``: a model of PyTorch in Deepwell's trainer, and its weights back."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import inspect
import json
import os
import tempfile
import weakref
from pathlib import Path

import torch
from torch import nn

from deepwell import swaps
from deepwell.library import (
    KERNELS_VARIABLE,
    LIBRARY_VARIABLE,
    DeepwellError,
    UnsupportedError,
    is_available,
)

#: Targets that do not count, as in PyTorch.
IGNORED = -100

_POINTER = ctypes.c_void_p


class _StepResult(ctypes.Structure):
    """``DwStepResult`` of ``deepwell_engine.h``."""

    _fields_ = [
        ("loss", ctypes.c_float),
        ("grad_norm", ctypes.c_float),
        ("skipped", ctypes.c_int32),
    ]


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Results of :meth:`Engine.step`."""

    #: Mean loss of the targets that count, before the update.
    loss: float
    #: Norm of all gradients, before clipping.
    grad_norm: float
    #: Whether gradients were not finite, so that the weights are as before.
    skipped: bool


@functools.cache
def _library() -> ctypes.CDLL:
    # Beside the library of the kernels, wherever that is.
    chosen = os.environ.get(LIBRARY_VARIABLE)
    folder = Path(chosen).parent if chosen else Path(__file__).parent
    path = folder / "libdeepwell_engine.so"
    if not path.is_file():
        raise DeepwellError(
            f"libdeepwell_engine.so: expected a file at {path}, found none\n"
            "hint: install the wheel of deepwell, or put a library built by "
            "`cargo build --release --package deepwell-engine` there"
        )
    kernels = path.with_name("kernels")
    if kernels.is_dir():
        os.environ.setdefault(KERNELS_VARIABLE, str(kernels))
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise DeepwellError(f"{path}: the library does not load: {error}") from error
    text, size = ctypes.c_char_p, ctypes.c_size_t
    loaded.dw_engine_last_error.restype = text
    loaded.dw_engine_create.argtypes = [text, ctypes.POINTER(_POINTER)]
    loaded.dw_engine_destroy.argtypes = [_POINTER]
    loaded.dw_engine_destroy.restype = None
    loaded.dw_engine_describe.argtypes = [_POINTER]
    loaded.dw_engine_describe.restype = text
    ids = [_POINTER, _POINTER, _POINTER, size]
    double, result = ctypes.c_double, ctypes.POINTER(_StepResult)
    loaded.dw_engine_step.argtypes = [*ids, double, double, result]
    loaded.dw_engine_evaluate.argtypes = [*ids, ctypes.POINTER(ctypes.c_float)]
    for name in ("read", "write"):
        getattr(loaded, f"dw_engine_{name}_tensor").argtypes = [_POINTER, text, _POINTER, size]
    return loaded


def _check(status: int) -> None:
    if status:
        raise DeepwellError(_library().dw_engine_last_error().decode())


class Engine:
    """A model in Deepwell's trainer: weights, AdamW and its kernels, apart from PyTorch's. Made by
    :func:`capture`."""

    def __init__(self, options: dict, shape: tuple[int, int], untrained: dict, trained: dict):
        handle = _POINTER()
        text = json.dumps(options).encode()
        _check(_library().dw_engine_create(text, ctypes.byref(handle)))
        self._handle = handle
        weakref.finalize(self, _library().dw_engine_destroy, handle)
        #: Sequences of a step, and tokens of a sequence.
        self.shape = shape
        #: Device, predicted memory, remarks of the capture, and names of trained tensors.
        self.description: dict = json.loads(_library().dw_engine_describe(handle))
        names = set(self.description["tensors"])
        #: Tensors that the engine does not train, as they were at the capture.
        self._untrained = untrained | {k: v for k, v in trained.items() if k not in names}
        self._trained = {key: value for key, value in trained.items() if key in names}

    def step(self, batch, *, lr: float, max_grad_norm: float = 1.0) -> StepResult:
        """Trains one step on a batch: token ids ``[batch, seq]``, a mapping with ``input_ids`` and,
        if wanted, ``labels`` as transformers takes them, or a pair of ids and the ids that should
        follow them. Sizes are those of the example of :func:`capture`."""
        inputs, targets = self._ids(batch)
        result = _StepResult()
        status = _library().dw_engine_step(
            self._handle, inputs.data_ptr(), targets.data_ptr(), inputs.numel(), lr, max_grad_norm,
            ctypes.byref(result),
        )  # fmt: skip
        _check(status)
        return StepResult(result.loss, result.grad_norm, bool(result.skipped))

    def evaluate(self, batch) -> float:
        """The mean loss of a batch, as of :meth:`step`, without training."""
        inputs, targets = self._ids(batch)
        loss = ctypes.c_float()
        status = _library().dw_engine_evaluate(
            self._handle, inputs.data_ptr(), targets.data_ptr(), inputs.numel(), ctypes.byref(loss)
        )
        _check(status)
        return loss.value

    def _ids(self, batch) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(batch, (tuple, list)):
            inputs, targets = batch
        else:
            inputs, labels = _ids_and_labels(batch)
            end = torch.full_like(labels[:, :1], IGNORED)
            targets = torch.cat([labels[:, 1:], end], 1)
        for ids in (inputs, targets):
            if tuple(ids.shape) != self.shape:
                raise ValueError(f"batch: expected {list(self.shape)}, got {list(ids.shape)}")
        return tuple(ids.to("cpu", torch.int32).contiguous() for ids in (inputs, targets))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The weights for ``model.load_state_dict``: its names, types and devices."""
        state = {name: value.clone() for name, value in self._untrained.items()}
        for name, like in self._trained.items():
            values = like.detach().to("cpu", torch.float32, copy=True).contiguous()
            status = _library().dw_engine_read_tensor(
                self._handle, name.encode(), values.data_ptr(), values.numel()
            )
            _check(status)
            state[name] = values.to(like.device, like.dtype)
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Takes the weights of a ``state_dict``. The optimizer's moments stay."""
        missing = sorted(set(self._trained) - set(state))
        if missing:
            raise KeyError(f"expected all trained tensors, {missing[0]!r} is missing")
        for name in self._trained:
            values = state[name].detach().to("cpu", torch.float32).contiguous()
            status = _library().dw_engine_write_tensor(
                self._handle, name.encode(), values.data_ptr(), values.numel()
            )
            _check(status)


def _ids_and_labels(batch) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return batch, batch
    ids = batch["input_ids"]
    mask = batch.get("attention_mask")
    if mask is not None and not bool((mask == 1).all()):
        raise UnsupportedError(
            "attention_mask: expected ones, got padding\nhint: pack sequences, or leave padding "
            "out of the loss by labels of -100, on the right of each sequence"
        )
    return ids, batch.get("labels", ids)


def capture(
    model: nn.Module,
    example,
    *,
    precision: str = "auto",
    device: str | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    micro_batch: int | None = None,
) -> Engine:
    """Gives a causal language model to Deepwell's trainer, and returns its engine.

    The model is exported (``torch.export``) for token ids of the sizes of ``example``: ids
    ``[batch, seq]``, or a mapping with ``input_ids``. The model itself does not change;
    ``model.load_state_dict(engine.state_dict())`` brings the trained weights back. ``precision`` is
    one of ``deepwell train``. Without ``device`` the engine is on the GPU if there is one. Weight
    decay applies to matrices alone.
    """
    ids, _ = _ids_and_labels(example)
    if ids.dim() != 2:
        raise ValueError(f"example: expected ids [batch, seq], got {list(ids.shape)}")
    _check_model(model)
    if device is None:
        device = "cuda:0" if is_available()[0] else "cpu"
    _library()
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "model.pt2")
        torch.export.save(_export(model, ids), archive)
        options = {
            "archive": str(archive), "device": device, "precision": precision,
            "batch": ids.shape[0], "seq": ids.shape[1], "micro_batch": micro_batch,
            "betas": list(betas), "eps": eps, "weight_decay": weight_decay,
        }  # fmt: skip
        parameters = dict(model.named_parameters(remove_duplicate=False))
        state = model.state_dict(keep_vars=False)
        trained = {name: value for name, value in state.items() if name in parameters}
        rest = {name: value.clone() for name, value in state.items() if name not in parameters}
        return Engine(options, tuple(ids.shape), rest, trained)


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if swaps.is_swapped(module):
            raise DeepwellError(
                f"`{name}`: expected a module of the model's own, got one that `optimize` swapped\n"
                "hint: deepwell.restore(model) before deepwell.capture"
            )
        rate = module.p if isinstance(module, nn.Dropout) else 0.0
        rate = rate or getattr(module, "attention_dropout", 0.0)
        if isinstance(rate, float) and rate > 0.0:
            raise UnsupportedError(
                f"`{name}`: expected no dropout, which the trainer does not have, got {rate}\n"
                "hint: set it to 0 in the model's configuration"
            )


def _export(model: nn.Module, ids: torch.Tensor):
    arguments = {"input_ids": torch.zeros_like(ids, device=next(model.parameters()).device)}
    known = inspect.signature(model.forward).parameters
    if "use_cache" in known:
        arguments["use_cache"] = False
    if "input_ids" not in known:
        arguments = {next(iter(known)): arguments["input_ids"]}
    training = model.training
    model.eval()
    try:
        return torch.export.export(model, (), arguments)
    finally:
        model.train(training)
