"""The kernels of an update's gradient: the numbers of the operators that they stand for, and that a GPU's compiler
takes them. Where there is no GPU, Triton's interpreter runs them."""

from __future__ import annotations

import copy
import re
import subprocess
import sys

import pytest
import torch
from conftest import CPU, chain, tiny
from decode_cases import PROMPT, adapter_spec, lens
from pretend_gpu import GPU, pretended
from test_bench_gpu import SMALL

from tracedraft.adapters import objective
from tracedraft.benchmark import gpu
from tracedraft.decode import respond
from tracedraft.meter import Meter
from tracedraft.target import LlamaTarget

pytest.importorskip("triton", reason="comes with torch for CUDA; elsewhere: pip install triton")
fused = pytest.importorskip("tracedraft.adapters.fused")

KERNELS = fused.rms_norm, fused.kl_parts
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# One block of logits and several, each with and without a rest.
SIZES = [100, fused.BLOCK, 2 * fused.BLOCK, 2 * fused.BLOCK + 1]
# Of a probability: an fp32 exponent of 16 to 32 is off by up to 1e-6, and so is the sum below it; bf16 has 8 bits.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def drawn(size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits as far apart as a model's, and a teacher that is not theirs."""
    g = torch.Generator().manual_seed(size)
    logits = (6 * torch.randn(5, size, generator=g)).to(dtype)
    return logits.to(DEVICE), torch.softmax(4 * torch.randn(5, size, generator=g), -1).to(DEVICE)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_kl_is_that_of_the_operators(size, dtype, temperature):
    logits, teacher = drawn(size, dtype)
    for kept in (torch.float32, torch.bfloat16):
        cross, residual = fused.kl_parts(logits, teacher, temperature, kept)
        expected = objective.kl_parts(logits.clone(), teacher, temperature, kept)
        # A sum of thousands of products of order 10, in another order.
        torch.testing.assert_close(cross, expected[0], rtol=1e-5, atol=1e-5)
        # Against double precision, since the operators' own softmax is 2.5e-6 off on some CPUs.
        exact = torch.softmax(logits.double() / temperature, -1)
        off = (residual.double() - (exact - teacher.double())).abs()
        assert (off <= ROUNDING[kept] * torch.maximum(exact, teacher.double()) + 1e-10).all()
        assert residual.dtype is kept


@pytest.mark.parametrize("hidden", [24, 100, 576])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_is_that_of_the_operators(hidden, dtype):
    g = torch.Generator().manual_seed(hidden)
    features = (3 * torch.randn(7, hidden, generator=g)).to(DEVICE)
    gain = torch.randn(hidden, generator=g).to(DEVICE, dtype)
    for made, expected in zip(
        fused.rms_norm(features, gain, 1e-5), objective.rms_norm(features, gain, 1e-5), strict=True
    ):
        torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-6)


def test_views_are_read_where_they_lie():
    logits, teacher = drawn(64, torch.float32)
    made = fused.kl_parts(logits.T.contiguous().T, teacher.T.contiguous().T, 1.0, torch.float32)
    torch.testing.assert_close(made, fused.kl_parts(logits, teacher, 1.0, torch.float32), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, which interprets
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows(bad):
    """As it does to the operators, or an update that must be refused would be made; the other rows do not mind."""
    logits, teacher = drawn(5000, torch.float32)
    logits[1, 4500] = bad
    expected = objective.kl_parts(logits.clone(), teacher, 1.0, torch.float32)
    cross, residual = fused.kl_parts(logits, teacher, 1.0, torch.float32)
    assert cross.isfinite().tolist() == [True, False, True, True, True]
    assert torch.equal(residual.isfinite().all(dim=1), expected[1].isfinite().all(dim=1))


@pytest.mark.parametrize("name", ["reset", "reset_lowrank", "persistent"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_draft_learns_the_same(name, dtype, monkeypatch):
    """Over a response with an update every other round: the losses, and what is learnt."""
    made = []
    for functions in ((objective.rms_norm, objective.kl_parts), KERNELS):
        monkeypatch.setattr(objective, "operators", lambda device, chosen=functions: chosen)
        usual = tiny(dtype).target
        target = LlamaTarget(copy.deepcopy(usual.model).to(DEVICE), usual.taps, usual.eos_ids, usual.context)
        draft = lens(target)
        learner = adapter_spec(name, train="head").build(draft.head, 0)
        learner.begin_conversation()
        response = respond(target, draft, learner, PROMPT, chain(max_new_tokens=24), 0, Meter(DEVICE))
        losses = [update.loss for update in response.updates if update.committed]
        made.append((response.tokens, losses, learner.drift()["weight"]))
    (tokens, losses, drift), (again, others, other) = made
    assert tokens == again
    assert len(losses) > 5
    # Rounding of the residual, which each later update stands on.
    assert others == pytest.approx(losses, rel=1e-5 if dtype == "float32" else 1e-2)
    assert other == pytest.approx(drift, rel=1e-4 if dtype == "float32" else 1e-2)


def test_on_a_gpu_they_are_chosen(monkeypatch):
    choose = objective.operators.__wrapped__  # past what it remembers
    monkeypatch.setattr(fused, "rms_norm", lambda *_: None)
    with pretended():
        assert choose(GPU) == (fused.rms_norm, fused.kl_parts)
    assert choose(CPU) == (objective.rms_norm, objective.kl_parts)


def test_where_they_can_t_be_compiled_updates_go_without_and_say_so(monkeypatch):
    def fails(*_):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(fused, "rms_norm", fails)
    with pretended(), pytest.warns(UserWarning, match="RuntimeError: Failed to find C compiler"):
        assert objective.operators.__wrapped__(GPU) == (objective.rms_norm, objective.kl_parts)


def test_the_gpu_s_bench_times_them_beside_the_operators(monkeypatch):
    target = SMALL.target(CPU)
    bench = gpu.Bench(SMALL, target, SMALL.draft(target), [1] * 12, Meter(CPU))
    kernels, operators = gpu.gradient_rows(bench, 1e9)
    assert (kernels["ms"], kernels["reason"]) == (None, "there is no GPU")
    assert operators["ratio"] == pytest.approx(operators["limit_ms"] / operators["ms"])
    monkeypatch.setattr(objective, "operators", lambda device: KERNELS)
    kernels, _ = gpu.gradient_rows(bench, 1e9)
    assert kernels["ms"] > 0
    assert kernels["reason"] is None


COMPILE = """
import subprocess
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tracedraft.adapters import fused

kl = {"logits": "*bf16", "teacher": "*fp32", "cross": "*fp32", "residual": "*bf16", "temperature": "fp32"}
norm = {"features": "*fp32", "gain": "*bf16", "unit": "*fp32", "normed": "*fp32", "eps": "fp32"}
for kernel, types, sizes in (
    (fused.kl_kernel, kl, {"DRAFTED": 32000, "BLOCK": fused.BLOCK}),
    (fused.rms_norm_kernel, norm, {"HIDDEN": 4096, "BLOCK": 4096}),
):
    source = ASTSource(fn=kernel, signature=types | dict.fromkeys(sizes, "constexpr"), constexprs=sizes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": fused.WARPS})
    Path("kernel.cubin").write_bytes(made.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    subprocess.run([tool, "--dump-resource-usage", "kernel.cubin"], check=True)
"""


def test_a_compiler_takes_them_for_an_8b_model_s_draft(tmp_path, monkeypatch):
    """For compute capability 9.0, that of an H200, down to its machine code, whose registers hold all they must."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # What registers have no room for is put on a thread's stack.
    assert re.findall(r"STACK:(\d+)", done.stdout) == ["0", "0"], done.stdout
