"""Records of the profiler, from a trace as CUPTI gives it: the trace of a GPU is not made here."""

import pytest
import torch

import deepwell
from deepwell import plans, profiler


def event(category, name="", ts=0.0, dur=1.0, tid=1, **args):
    return {"cat": category, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


#: Two GEMMs and a norm: a launch is in the time of its call, the kernel runs later.
TRACE = [
    event("user_annotation", "deepwell::gemm", ts=10, dur=5),
    event("user_annotation", "deepwell::norm", ts=20, dur=5),
    event("user_annotation", "deepwell::gemm", ts=30, dur=5),
    event("user_annotation", "another", ts=40, dur=5),
    event("cuda_driver", "cuLaunchKernelEx", ts=12, correlation=1),
    event("cuda_driver", "cuMemsetD8Async", ts=21, correlation=2),
    event("cuda_driver", "cuLaunchKernelEx", ts=22, correlation=3),
    event("cuda_driver", "cuLaunchKernelEx", ts=31, correlation=4),
    event("cuda_runtime", "cudaLaunchKernel", ts=37, correlation=5),
    event("cuda_runtime", "cudaLaunchKernel", ts=31, tid=2, correlation=6),
    event("kernel", "gemm_kernel", ts=100, dur=30, correlation=1, **{
        "est. achieved occupancy %": 20, "registers per thread": 168, "shared memory": 1000,
    }),
    event("gpu_memset", "Memset", ts=130, dur=1, correlation=2),
    event("kernel", "norm_kernel", ts=131, dur=4, correlation=3),
    event("kernel", "gemm_kernel", ts=140, dur=10, correlation=4, **{
        "est. achieved occupancy %": 60, "registers per thread": 32, "shared memory": 10,
    }),
    event("kernel", "of PyTorch", ts=150, dur=99, correlation=5),
    event("kernel", "of another thread", ts=150, dur=99, correlation=6),
]  # fmt: skip

MANIFEST = {
    "compiled": [
        {
            "architecture": "sm_100a",
            "kernels": [
                {"entry": "gemm_kernel", "tensor_instructions": {"UTCQMMA": 8}},
                {"entry": "norm_kernel", "tensor_instructions": {}},
            ],
        },
        {"architecture": "sm_90a", "kernels": []},
        {"architecture": "sm_100a"},
    ]
}


def test_kernels_belong_to_the_call_that_launched_them():
    functions = profiler.functions_of(MANIFEST, "sm_100a")
    records = profiler.records_of(TRACE, functions)
    assert set(records) == {"gemm", "norm"}
    gemm, norm = records["gemm"], records["norm"]
    assert (gemm.calls, gemm.total_us, gemm.registers, gemm.shared_bytes) == (2, 40, 168, 1000)
    # By time: (30 · 20 % + 10 · 60 %) / 40.
    assert gemm.occupancy == pytest.approx(0.3)
    assert (gemm.tmem_columns, gemm.uses_tensor_pipes) == (512, True)
    assert (norm.total_us, norm.occupancy, norm.tmem_columns) == (5, None, 0)
    gemm.flops = 80_000_000
    assert gemm.tflops == pytest.approx(2.0)
    assert "2.0" in profiler.table([gemm, norm]) and "30 %" in profiler.table([gemm, norm])
    assert profiler.functions_of(MANIFEST, "sm_90a") == {}


def test_flops_of_a_plan():
    seen = []

    def watch(plan, run):
        seen.append((plan.kernel, plan.flops))
        run()

    plans.WATCHERS.append(watch)
    try:
        q = torch.randn(1, 64, 2, 32)
        deepwell.attention(q, q, q, causal=False)
    finally:
        plans.WATCHERS.remove(watch)
    # Two GEMMs of 64 x 64 x 32 for each head, two operations per multiply-add.
    assert seen == [("cpu_attention_f32", 2 * 2 * 2 * 64 * 64 * 32)]


def test_without_a_gpu_it_says_so():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(deepwell.DeepwellError, match="measures kernels of a GPU: PyTorch sees no"):
        deepwell.KernelProfiler(deepwell.BlackwellConfig(enable_profiling=True))
