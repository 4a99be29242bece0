"""Puts empty stand-ins beside PyTorch for the CUDA libraries that it links with.

    python3 stub_cuda.py FOLDER_OF_TORCH

PyPI has PyTorch for Linux on x86-64 with CUDA only, and its libraries take 3 GB. Tests on the CPU
call none of them, but the loader wants them. Each function of a stand-in returns 100, "no device",
or this text where PyTorch asks for the text of an error.
Needs `cc`, `nm` and `readelf`.
"""

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

NO_DEVICE = 100
#: What functions of these libraries begin with.
PREFIXES = "cu|nccl|nvrtc|nvshmem"


def output(*command) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def versions(library: Path) -> dict[str, str]:
    """Needed libraries by the names of versions that a library asks them for."""
    found, name = {}, ""
    for line in output("readelf", "-V", "-W", str(library)).splitlines():
        if file := re.search(r"File: (\S+)", line):
            name = file[1]
        elif name and (version := re.search(r"Name: (\S+)", line)):
            found[version[1]] = name
    return found


def function(symbol: str) -> str:
    """C source of a stand-in."""
    if symbol.startswith("cuGetError"):
        return f'int {symbol}(int error, const char **text) {{ *text = "no device"; return 0; }}'
    if symbol.endswith(("ErrorString", "ErrorName")):
        return f'const char *{symbol}(void) {{ return "no device"; }}'
    return f"int {symbol}(void) {{ return {NO_DEVICE}; }}"


def stub(folder: Path, name: str, symbols: dict[str, set[str]]) -> None:
    lines = [function(symbol) for of_version in symbols.values() for symbol in of_version]
    nodes = [f"{version} {{ global: *; }};" for version in symbols]
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch, "stub.c"), Path(scratch, "stub.map")
        source.write_text("\n".join(lines))
        script.write_text("\n".join(nodes))
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-w", "-fno-builtin", source, "-o", folder / name,
             f"-Wl,-soname,{name},--version-script={script}"],
            check=True,
        )  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1], "lib")
    libraries = sorted(folder.glob("*.so"))
    known = output("ldconfig", "-p")
    needed, loose = set(), set()
    symbols = defaultdict(lambda: defaultdict(set))
    for library in libraries:
        needed |= set(re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-d", str(library))))
        names = versions(library)
        for version, name in names.items():
            symbols[name][version].update()
        undefined = output("nm", "-D", "--undefined-only", "--with-symbol-versions", str(library))
        for symbol, version in re.findall(r" U (\w+)@(\S+)", undefined):
            if version in names:
                symbols[names[version]][version].add(symbol)
        loose |= set(re.findall(rf" U ((?:{PREFIXES})\w+)$", undefined, re.MULTILINE))
    for name in sorted(needed):
        if not (folder / name).exists() and f"\t{name} " not in known:
            # A name without a version may come from any library.
            stub(folder, name, symbols[name] or {"NONE": loose})


if __name__ == "__main__":
    main()
