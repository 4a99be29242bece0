"""Deepwell's kernels for PyTorch.

``deepwell.optimize(model)`` makes a model use them in place. Importing the package loads neither
PyTorch nor the library; both are looked for when a name that needs them is used.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

#: Public names and the modules that define them.
_MODULES = {
    "optimize": "model",
    "restore": "model",
    "report": "model",
    "compare": "model",
    "Report": "model",
    "BlackwellConfig": "blackwell",
    "BlackwellFlashAttention": "blackwell",
    "DWSelfAttention": "blackwell",
    "KernelProfiler": "profiler",
    "optimize_for_blackwell": "blackwell",
    "DeepwellError": "library",
    "UnsupportedError": "library",
    "is_available": "library",
    "AdamW": "adamw",
    "capture": "engine",
    "Engine": "engine",
    "attention": "functional",
    "linear_cross_entropy": "cross_entropy",
    "layer_norm": "functional",
    "rms_norm": "functional",
    "rope": "functional",
    "rope_table": "functional",
    "swiglu": "functional",
    "gelu_tanh": "functional",
}

__all__ = ["__version__", *_MODULES]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module 'deepwell' has no attribute {name!r}")
    module = importlib.import_module(f"deepwell.{_MODULES[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
