"""Writes the wheel of `deepwell`: the Python files, the libraries and compiled kernels.

    python3 build_wheel.py --library LIB --out FOLDER [--engine LIB] [--kernels FOLDER]

Needs Python alone. The same files give the same bytes. The platform tag comes from the newest glibc
that a library asks for.
"""

import argparse
import base64
import hashlib
import re
import sys
import zipfile
from pathlib import Path

import tomllib

HERE = Path(__file__).resolve().parent
#: Oldest glibc that a tag names, that of RHEL 8.
OLDEST_GLIBC = 28
#: PyPI takes files up to this size.
LARGEST_BYTES = 100_000_000
#: Cubins, and the manifest with their registers and shared memory.
KERNELS = ("*/*.cubin", "manifest.json")


def platform_tag(library: bytes) -> str:
    """The tag of a library, from the names of versions that it links against."""
    versions = [int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)(?:\.\d+)?\0", library)]
    return f"manylinux_2_{max([OLDEST_GLIBC, *versions])}_x86_64"


def metadata(project: dict) -> str:
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {project['name']}",
        f"Version: {project['version']}",
        f"Summary: {project['description']}",
        f"Requires-Python: {project['requires-python']}",
        f"License-Expression: {project['license']}",
    ]
    lines += [f"Classifier: {name}" for name in project["classifiers"]]
    for extra, requirements in project["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f'Requires-Dist: {name} ; extra == "{extra}"' for name in requirements]
    lines += ["Description-Content-Type: text/markdown", "", (HERE / "README.md").read_text()]
    return "\n".join(lines)


def contents(
    libraries: list[Path], kernels: Path | None, info: str, project: dict
) -> dict[str, bytes]:
    """Files of the wheel by name, without RECORD."""
    files = {f"deepwell/{p.name}": p.read_bytes() for p in (HERE / "deepwell").glob("*.py")}
    data = b""
    for library in libraries:
        files[f"deepwell/{library.name}"] = library.read_bytes()
        data += files[f"deepwell/{library.name}"]
    if kernels is not None:
        found = [path for pattern in KERNELS for path in kernels.glob(pattern)]
        if not any(path.suffix == ".cubin" for path in found):
            sys.exit(
                f"error: {kernels}: expected cubins, found none\n"
                "hint: `cargo xtask kernels` compiles them; `--no-kernels` makes a wheel for CPUs"
            )
        for path in found:
            files[f"deepwell/kernels/{path.relative_to(kernels).as_posix()}"] = path.read_bytes()
    for name in ("LICENSE-APACHE", "LICENSE-MIT"):
        files[f"{info}/licenses/{name}"] = (HERE.parent / name).read_bytes()
    files[f"{info}/METADATA"] = metadata(project).encode()
    tag = f"py3-none-{platform_tag(data)}"
    wheel = f"Wheel-Version: 1.0\nGenerator: deepwell\nRoot-Is-Purelib: false\nTag: {tag}\n"
    files[f"{info}/WHEEL"] = wheel.encode()
    return files


def record(files: dict[str, bytes], info: str) -> bytes:
    lines = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    return "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--engine", type=Path)
    parser.add_argument("--kernels", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    stem = f"{project['name']}-{project['version']}"
    info = f"{stem}.dist-info"
    libraries = [path for path in (arguments.library, arguments.engine) if path is not None]
    files = dict(sorted(contents(libraries, arguments.kernels, info, project).items()))
    files[f"{info}/RECORD"] = record(files, info)
    arguments.out.mkdir(parents=True, exist_ok=True)
    tag = platform_tag(b"".join(data for name, data in files.items() if name.endswith(".so")))
    path = arguments.out / f"{stem}-py3-none-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            wheel.writestr(entry, data)
    size = path.stat().st_size
    if size > LARGEST_BYTES:
        sys.exit(f"error: {path}: expected at most {LARGEST_BYTES} bytes, got {size}")
    count = sum(name.endswith(".cubin") for name in files)
    print(f"{path}: {size / 1e6:.1f} MB, {len(files)} files, {count} cubins")


if __name__ == "__main__":
    main()
