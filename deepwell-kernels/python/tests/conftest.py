"""Tests run on the CPU kernels of the library: of the wheel, of DEEPWELL_LIBRARY, or of a build."""

import os
from pathlib import Path

import pytest
import torch

from deepwell.library import LIBRARY_VARIABLE

#: The repository, if the tests are in it.
_PARENTS = Path(__file__).resolve().parents
WORKSPACE = next((path for path in _PARENTS if (path / "Cargo.lock").exists()), _PARENTS[0])
BUILDS = ("release/libdeepwell.so", "debug/libdeepwell.so", "debug/deps/libdeepwell.so")


def _find_library() -> None:
    import deepwell

    if (
        LIBRARY_VARIABLE in os.environ
        or Path(deepwell.__file__).with_name("libdeepwell.so").exists()
    ):
        return
    for build in BUILDS:
        if (path := WORKSPACE / "target" / build).exists():
            os.environ[LIBRARY_VARIABLE] = str(path)
            return
    raise pytest.UsageError(
        "libdeepwell.so: no build found\nhint: cargo build --release --package deepwell-capi"
    )


_find_library()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
