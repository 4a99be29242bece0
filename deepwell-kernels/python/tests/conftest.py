"""Tests run on the CPU kernels of the library: of the wheel, of DEEPWELL_LIBRARY, or of a build.

Without ``--all`` a test runs with as few combinations of its parameters as have every value of each
parameter once, and without the tests marked ``slow``: CI does this. ``--all`` runs everything.
"""

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


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="every combination, and slow tests")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: half a minute or more of compilation")


def covering(combinations: list[dict]) -> list[bool]:
    """Which combinations of parameters to keep, so that no value of a parameter is left out."""
    seen: set[tuple] = set()
    kept = []
    for parameters in combinations:
        values = set(parameters.items())
        kept.append(not parameters or not values <= seen)
        if kept[-1]:
            seen |= values
    return kept


def pytest_collection_modifyitems(config, items):
    if config.getoption("--all"):
        return
    of_function: dict[str, list] = {}
    dropped = [item for item in items if item.get_closest_marker("slow")]
    for item in items:
        of_function.setdefault(item.nodeid.split("[")[0], []).append(item)
    for rows in of_function.values():
        # By identity: parameters may be functions and lists.
        combinations = [
            {name: id(value) for name, value in row.callspec.params.items()}
            if hasattr(row, "callspec")
            else {}
            for row in rows
        ]
        kept = covering(combinations)
        dropped += [row for row, keep in zip(rows, kept) if not keep]
    gone = set(map(id, dropped))
    items[:] = [item for item in items if id(item) not in gone]
    config.hook.pytest_deselected(items=dropped)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
