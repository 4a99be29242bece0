"""The package without PyTorch, without a GPU and without its library."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import deepwell

FOLDER = Path(deepwell.__file__).resolve().parents[1]


def run(code: str, **environment) -> str:
    """Output of Python code that sees this package and the standard library, no PyTorch."""
    environment = {"PYTHONPATH": str(FOLDER), "PATH": os.environ["PATH"], **environment}
    blocked = "import sys; sys.modules['torch'] = None\n"
    command = [sys.executable, "-c", blocked + code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_without_torch():
    assert "0.1.0" in run("import deepwell; print(deepwell.__version__)")
    said = run("import deepwell; print(deepwell.is_available())")
    assert "PyTorch is missing" in said and "pip install" in said


def test_without_the_library():
    code = "from deepwell.library import library; library()"
    said = run(code, DEEPWELL_LIBRARY="/nowhere/libdeepwell.so")
    assert "expected a file at /nowhere/libdeepwell.so, found none" in said
    assert "hint: install the wheel" in said


def test_no_check_vanishes_with_python_o():
    for path in (FOLDER / "deepwell").glob("*.py"):
        found = [node for node in ast.walk(ast.parse(path.read_text())) if type(node) is ast.Assert]
        assert not found, f"{path.name}, line {found[0].lineno}"


def test_every_public_name_is_there():
    assert {name for name in dir(deepwell) if getattr(deepwell, name) is None} == set()


def test_a_covering_of_combinations():
    from conftest import covering

    rows = [{"a": a, "b": b} for a in range(3) for b in range(2)]
    kept = [row for row, keep in zip(rows, covering(rows)) if keep]
    assert kept == [{"a": 0, "b": 0}, {"a": 0, "b": 1}, {"a": 1, "b": 0}, {"a": 2, "b": 0}]
    assert covering([{}, {}]) == [True, True]


def test_a_name_is_the_same_after_its_module_is_loaded():
    # A submodule of the name of a function would take its place.
    for name in dir(deepwell):
        if not name.startswith("_"):
            assert getattr(deepwell, name) is getattr(deepwell, name), name
            assert not isinstance(getattr(deepwell, name), type(sys)), name
