"""``KernelProfiler``: time, rate and occupancy of the library's kernels in a block of code."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import json
import os
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from deepwell import plans
from deepwell.blackwell import BlackwellConfig
from deepwell.library import KERNELS_VARIABLE, DeepwellError, is_available, library

#: What marks a call of the library in a trace.
_MARK = "deepwell::"
#: Columns of tensor memory: a kernel with `tcgen05` instructions allocates all of an SM's.
_TMEM_COLUMNS = 512
#: FLOPs of an SM's tensor pipes in a clock, dense, by compute capability: for BF16, for FP8.
_PIPE_FLOPS = {(9, 0): (4096, 8192), (10, 0): (8192, 16384), (10, 3): (8192, 16384)}


@dataclasses.dataclass
class KernelRecord:
    """Calls of one kernel of the library."""

    kernel: str
    calls: int = 0
    #: Time on the device of all calls, in microseconds.
    total_us: float = 0.0
    #: Floating-point operations of all calls, by the definitions of the ops.
    flops: int = 0
    #: Warps of an SM that ran, as a part of those that fit, on average, as CUPTI estimates it from
    #: the launch: too low for persistent kernels. ``None`` if CUPTI gave none.
    occupancy: float | None = None
    #: FLOP/s as a part of what the tensor pipes do at the largest clock; ``None`` for kernels
    #: without tensor instructions, and for GPUs whose rate is not known.
    tensor_pipe_share: float | None = None
    #: Columns of tensor memory that a CTA allocates.
    tmem_columns: int = 0
    #: Of a thread.
    registers: int = 0
    #: Of a CTA.
    shared_bytes: int = 0
    uses_tensor_pipes: bool = False

    @property
    def tflops(self) -> float:
        """TFLOP/s on average."""
        return self.flops / self.total_us / 1e6 if self.total_us else 0.0


class KernelProfiler:
    """Measures each kernel of the library in a ``with`` block, by CUPTI through PyTorch's profiler.

    ``records()`` has the kernels by time, ``print(profiler)`` a table. Work of a CUDA graph is not
    seen. Without a GPU the constructor raises :class:`DeepwellError`. With
    ``BlackwellConfig(enable_profiling=True)`` the table is printed at the end of the block.
    """

    def __init__(self, config: BlackwellConfig | None = None):
        self._prints = config is not None and config.enable_profiling
        available, reason = is_available()
        if not available:
            raise DeepwellError(f"the profiler measures kernels of a GPU: {reason}")
        self._profile = None
        self._flops: list[tuple[str, int]] = []
        self._trace: list[dict] = []

    def __enter__(self) -> KernelProfiler:
        torch.cuda.synchronize()
        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self._profile.__enter__()
        plans.WATCHERS.append(self._around)
        return self

    def __exit__(self, *error) -> None:
        plans.WATCHERS.remove(self._around)
        torch.cuda.synchronize()
        self._profile.__exit__(*error)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(path))
            self._trace = json.loads(path.read_text())["traceEvents"]
        self._profile = None
        if self._prints:
            print(self)

    def _around(self, plan, run) -> None:
        self._flops.append((plan.kernel, plan.flops))
        with record_function(f"{_MARK}{plan.kernel}"):
            run()

    def records(self) -> list[KernelRecord]:
        """The kernels, those that took longest first."""
        records = records_of(self._trace, manifest())
        for kernel, flops in self._flops:
            if kernel in records:
                records[kernel].flops += flops
        if torch.cuda.is_available():
            _set_shares(records.values())
        return sorted(records.values(), key=lambda record: -record.total_us)

    def times_us(self) -> dict[str, float]:
        """Microseconds on the device, by kernel."""
        return {record.kernel: record.total_us for record in self.records()}

    def __str__(self) -> str:
        return table(self.records())


def table(records: list[KernelRecord]) -> str:
    """Records as text."""
    lines = [
        f"{'kernel':40} {'calls':>6} {'total_us':>10} {'TFLOP/s':>8} {'occupancy':>9} {'tensor':>7}"
        f" {'TMEM':>5} {'registers':>9}"
    ]
    share = lambda value: "-" if value is None else f"{100 * value:.0f} %"  # noqa: E731
    for r in records:
        lines.append(
            f"{r.kernel:40} {r.calls:6} {r.total_us:10.1f} {r.tflops:8.1f} {share(r.occupancy):>9}"
            f" {share(r.tensor_pipe_share):>7} {r.tmem_columns:5} {r.registers:9}"
        )
    return "\n".join(lines)


def records_of(trace: list[dict], resources: dict[str, dict]) -> dict[str, KernelRecord]:
    """Records by kernel of the library, from the events of a trace: a kernel on the device belongs
    to the call in whose time its launch is, in the same thread. ``resources`` has what the manifest
    says of each function."""
    calls: dict[int, list[tuple[float, float, str]]] = {}
    launches: dict[int, tuple[int, float]] = {}
    records: dict[str, KernelRecord] = {}
    for event in trace:
        name, category = event.get("name", ""), event.get("cat", "")
        if category == "user_annotation" and name.startswith(_MARK):
            kernel = name.removeprefix(_MARK)
            begin = event["ts"]
            calls.setdefault(event["tid"], []).append((begin, begin + event["dur"], kernel))
            records.setdefault(kernel, KernelRecord(kernel)).calls += 1
        elif category in ("cuda_driver", "cuda_runtime"):
            launches[event["args"].get("correlation")] = (event["tid"], event["ts"])
    for of_thread in calls.values():
        of_thread.sort()
    weighted: dict[str, float] = {}
    for event in trace:
        if event.get("cat") not in ("kernel", "gpu_memset", "gpu_memcpy"):
            continue
        thread, at = launches.get(event["args"].get("correlation"), (None, 0.0))
        kernel = _call_at(calls.get(thread, []), at)
        if kernel is None:
            continue
        record, us = records[kernel], event["dur"]
        record.total_us += us
        if event["cat"] != "kernel":
            continue
        record.registers = max(record.registers, event["args"].get("registers per thread", 0))
        record.shared_bytes = max(record.shared_bytes, event["args"].get("shared memory", 0))
        used = resources.get(event["name"], {})
        record.uses_tensor_pipes |= used.get("uses_tensor_pipes", False)
        if used.get("uses_tensor_memory"):
            record.tmem_columns = _TMEM_COLUMNS
        occupancy = event["args"].get("est. achieved occupancy %")
        if occupancy is not None:
            seen = weighted.get(kernel, 0.0)
            before = record.occupancy or 0.0
            record.occupancy = (before * seen + occupancy / 100 * us) / (seen + us)
            weighted[kernel] = seen + us
    return records


def _call_at(calls: list[tuple[float, float, str]], at: float) -> str | None:
    """The kernel of the call that a time is in."""
    index = bisect.bisect_right(calls, (at, float("inf"), ""))
    if not index:
        return None
    _, end, kernel = calls[index - 1]
    return kernel if at <= end else None


@functools.cache
def manifest() -> dict[str, dict]:
    """Functions of the compiled kernels for this GPU, from the manifest beside them."""
    library()
    folder = os.environ.get(KERNELS_VARIABLE)
    path = Path(folder, "manifest.json") if folder else None
    if path is None or not path.is_file():
        return {}
    return functions_of(json.loads(path.read_text()), _architecture())


def _architecture() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}a"


def functions_of(content: dict, architecture: str) -> dict[str, dict]:
    """What a manifest says of the functions for an architecture."""
    functions = {}
    for compiled in content["compiled"]:
        if compiled["architecture"] != architecture:
            continue
        for kernel in compiled.get("kernels", []):
            instructions = kernel["tensor_instructions"]
            functions[kernel["entry"]] = {
                # SASS names the instructions of tcgen05 UTC…MMA.
                "uses_tensor_memory": any(name.startswith("UTC") for name in instructions),
                "uses_tensor_pipes": bool(instructions),
            }
    return functions


def _set_shares(records) -> None:
    """Shares of the tensor pipes' rate: of FP8's for MXFP8 kernels, else of BF16's."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    rates = _PIPE_FLOPS.get((properties.major, properties.minor))
    clock_khz = getattr(properties, "clock_rate", 0)
    if rates is None or not clock_khz:
        return
    for record in records:
        if record.uses_tensor_pipes:
            rate = rates["mxfp8" in record.kernel and "dequantized" not in record.kernel]
            peak = rate * properties.multi_processor_count * clock_khz * 1e3
            record.tensor_pipe_share = record.tflops * 1e12 / peak
