"""The Triton kernels against torch's operations: on a CUDA device, else in Triton's interpreter.

Without CUDA this file runs itself once more in a process in which Triton interprets its kernels; without
Triton, too, everything here is skipped and says so.
"""

import importlib.util
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gridtrain.sparsify import cuda_selection as device_module
from gridtrain.sparsify.cuda_selection import CudaSelection, are_kernels_correct
from gridtrain.sparsify.tensor_selection import AccumulationTerms, HostSelection
from gridtrain.sparsify.threshold_hint import value_bits

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
ON_CUDA = HAS_TRITON and torch.cuda.is_available()


def needs_kernels(test):
    """Mark a test that runs the kernels: on a CUDA device, elsewhere interpreted."""
    if ON_CUDA and not INTERPRETED:
        return pytest.mark.gpu(test)
    return pytest.mark.skipif(
        not INTERPRETED, reason="no Triton with a CUDA device, and it does not interpret here"
    )(test)


@pytest.fixture
def device():
    return torch.device("cpu" if INTERPRETED else "cuda")


def same(mine, theirs):
    return (
        np.array_equal(mine.indices_K, theirs.indices_K)
        and np.array_equal(mine.values_K.view(np.uint32), theirs.values_K.view(np.uint32))
        and mine.where_K.tolist() == theirs.indices_K.tolist()
    )


def terms_of(vectors, device, weight, momentum):
    residual_N, gradient_N, u_N = (vector.to(device) for vector in vectors)
    acc_N, new_u_N = torch.full_like(residual_N, 7.0), torch.full_like(residual_N, 7.0)
    if not momentum:
        return AccumulationTerms(residual_N, gradient_N, acc_N, weight)
    return AccumulationTerms(residual_N, gradient_N, acc_N, weight, u_N, new_u_N, momentum)


@needs_kernels
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight", [1.0, 0.0, 0.37])
@pytest.mark.parametrize("n", [1, 2047, 2048, 20_001])
def test_steps_are_those_of_the_host(device, n, weight, momentum):
    """Cold and with thresholds carried over, on a distribution that jumps up and down."""
    generator = torch.Generator().manual_seed(n)
    kernel, host = CudaSelection(), HostSelection()
    k = max(1, n // 100)
    for step, scale in enumerate((1.0, 1.0, 1000.0, 1e-6, 1.0)):
        vectors = torch.randn(3, n, generator=generator) * scale
        mine, theirs = (terms_of(vectors, place, weight, momentum) for place in (device, "cpu"))
        assert same(kernel.select(mine, k), host.select(theirs, k)), f"{step=}"
        assert torch.equal(mine.acc_N.cpu(), theirs.acc_N), f"{step=}"
        if momentum:
            assert torch.equal(mine.new_u_N.cpu(), theirs.new_u_N), f"{step=}"
    assert n < 100 or kernel.hint.misses >= 1  # a thousandth of what came before


@needs_kernels
@pytest.mark.parametrize("hint", [0, value_bits(2.0), 0x7F800000])
@pytest.mark.parametrize("kind", ["zeros", "equal", "one huge", "sorted", "integers", "infinite", "nan"])
def test_no_hint_changes_a_result(device, monkeypatch, kind, hint):
    monkeypatch.setattr(device_module, "_MIN_CAPACITY", 16)  # so that keys do not all find room
    n = 6000
    acc_N = {
        "zeros": torch.zeros(n),
        "equal": torch.full((n,), -3.0),
        "one huge": torch.cat((torch.zeros(n - 1), torch.tensor([3e38]))),
        "sorted": torch.arange(n) / 7.0,
        "integers": torch.randint(-5, 6, (n,), generator=torch.Generator().manual_seed(3)).float(),
        "infinite": torch.cat((torch.ones(n - 1), torch.tensor([-torch.inf]))),
        "nan": torch.cat((torch.tensor([torch.nan]), torch.ones(n - 1))),
    }[kind]
    for k in (1, 70, n):
        kernel = CudaSelection()
        kernel.hint.bits = hint
        vectors = acc_N, torch.zeros(n), torch.zeros(n)
        mine, theirs = (terms_of(vectors, place, 1.0, 0.0) for place in (device, "cpu"))
        assert same(kernel.select(mine, k), HostSelection().select(theirs, k)), f"{k=}"


@needs_kernels
def test_parts_of_a_vector_need_no_alignment(device):
    vectors = torch.randn(3, 5000, generator=torch.Generator().manual_seed(5))[:, 3:4098]
    mine, theirs = (terms_of(vectors, place, 0.5, 0.9) for place in (device, "cpu"))
    assert same(CudaSelection().select(mine, 40), HostSelection().select(theirs, 40))


@pytest.fixture
def no_verdicts(monkeypatch):
    monkeypatch.setattr(device_module, "_verdicts", {})


class Recorded:
    """A kernel whose launches are recorded: (grid, WEIGHTED, EMPTY, HAS_U)."""

    def __init__(self, kernel):
        self.kernel, self.launches = kernel, set()

    def __getitem__(self, grid):
        def launch(*args, **options):
            names = ("WEIGHTED", "EMPTY", "HAS_U")
            self.launches.add((*grid, *(options.get(name) for name in names)))
            return self.kernel[grid](*args, **options)

        return launch


@needs_kernels
def test_the_check_before_first_use_lets_right_kernels_pass(device, no_verdicts):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert are_kernels_correct(device)


@needs_kernels
def test_the_check_before_first_use_finds_wrong_kernels(device, no_verdicts, monkeypatch):
    select = CudaSelection.select
    monkeypatch.setattr(CudaSelection, "select", lambda self, terms, k: select(self, terms, k - 1))
    with pytest.warns(UserWarning, match=r"its results differ from torch's.*torch's operations are used"):
        assert not are_kernels_correct(device)


@needs_kernels
def test_a_launch_that_fails_leaves_torch(device, no_verdicts, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(CudaSelection, "_find", fail)
    with pytest.warns(UserWarning, match="RuntimeError: no C compiler"):
        assert not are_kernels_correct(device)


@needs_kernels
def test_the_check_before_first_use_runs_all_variants_of_the_kernels(device, no_verdicts, monkeypatch):
    """A variant that Triton cannot compile must not end a later step."""
    from gridtrain.sparsify import triton_kernels

    accumulate, histogram = Recorded(triton_kernels.accumulate), Recorded(triton_kernels.histogram)
    monkeypatch.setattr(triton_kernels, "accumulate", accumulate)
    monkeypatch.setattr(triton_kernels, "histogram", histogram)
    assert are_kernels_correct(device)
    shares = ((False, False), (True, False), (False, True))  # a weight of 1, another weight, no samples
    variants = {(*share, has_u) for share in shares for has_u in (False, True)}
    assert {launch[1:] for launch in accumulate.launches} == variants
    assert min(histogram.launches)[0] == 1 < max(histogram.launches)[0]


@needs_kernels
def test_only_a_check_that_was_completed_is_not_repeated(device, no_verdicts, monkeypatch):
    def fail(*args, **kwargs):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(CudaSelection, "_find", fail)
        with pytest.warns(UserWarning, match="OutOfMemoryError: CUDA out of memory"):
            assert not are_kernels_correct(device)
    assert are_kernels_correct(device)
    monkeypatch.setattr(CudaSelection, "_find", fail)
    assert are_kernels_correct(device)


def test_what_a_gpu_has_selected_is_copied_to_pinned_memory(monkeypatch):
    made = []

    def empty_like(values, **options):
        made.append(options)
        return SimpleNamespace(copy_=lambda source: ("copied", source))

    monkeypatch.setattr(torch, "empty_like", empty_like)
    on_host, on_gpu = torch.ones(3), SimpleNamespace(device=torch.device("cuda"))
    assert device_module._copy_to_host(on_host) is on_host and made == []
    assert device_module._copy_to_host(on_gpu) == ("copied", on_gpu)
    assert made == [{"device": "cpu", "pin_memory": True}]


@pytest.mark.skipif(
    not HAS_TRITON, reason="Triton is not installed, so that its kernels cannot even be interpreted"
)
@pytest.mark.skipif(INTERPRETED or ON_CUDA, reason="the kernels are tested in this process")
def test_the_kernels_in_the_interpreter():
    pytest.importorskip("triton", minversion="3.2", reason="an older interpreter does not run the kernels")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so that its kernels cannot be compiled")
@pytest.mark.skipif(INTERPRETED, reason="Triton interprets here")
@pytest.mark.parametrize("capability", [75, 80, 90])
def test_the_kernels_compile_and_never_fuse_a_product_with_a_sum(capability):
    """For devices that need not be here.  A fused multiply-add rounds once, and residuals would differ."""
    triton = pytest.importorskip("triton", minversion="3.3")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from gridtrain.sparsify import triton_kernels

    types = {"weight": "fp32", "momentum": "fp32", "n": "i32", "capacity": "i32", "keys_C": "*i64"}
    types |= {"threshold": "*i32", "count": "*i32", "counts_B": "*i32"}
    for weighted, empty, has_u in ((True, False, True), (False, True, False), (True, False, False)):
        constants = {"WEIGHTED": weighted, "EMPTY": empty, "HAS_U": has_u}
        constants |= {"SHIFT": device_module.HISTOGRAM_SHIFT, "BINS": device_module.HISTOGRAM_BINS}
        constants["BLOCK"] = 2048
        for kernel in (triton_kernels.accumulate, triton_kernels.histogram, triton_kernels.compact):
            mine = {name: constants[name] for name in kernel.arg_names if name in constants}
            signature = {
                name: "constexpr" if name in mine else types.get(name, "*fp32") for name in kernel.arg_names
            }
            source = ASTSource(fn=kernel, signature=signature, constexprs=mine)
            options = {"enable_fp_fusion": False, "num_warps": 8}
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            ptx = compiled.asm["ptx"]
            assert "fma." not in ptx and ".ftz" not in ptx and len(compiled.asm["cubin"]) > 1000
