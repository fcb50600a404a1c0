"""The served target: golden outputs, rows that round alike wherever they stand, and roll-back without a trace."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from conftest import chain, golden_json, golden_tensors, tiny
from torch import Tensor

from tracedraft import target as module
from tracedraft.errors import UserError
from tracedraft.target import LlamaTarget
from tracedraft.types import TargetPass

WIDTH = chain().width
DTYPES = ["float32", "bfloat16"]


def text(count: int, seed: int = 0) -> list[int]:
    return torch.randint(250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def row(passed: TargetPass, i: int) -> tuple[Tensor, Tensor, Tensor]:
    return passed.hidden[i], passed.taps[i], passed.logits[i]


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def step_by_step(target: LlamaTarget, tokens: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """One token a pass, each committed: nothing that could be rejected is ever seen."""
    rows = []
    for token in tokens:
        rows.append(row(target.verify(torch.tensor([token])), 0))
        target.commit(1)
    return rows


# Golden outputs: the tolerance is the reference's own; float32 noise was 6e-6


def test_golden_prefill(golden_target):
    expected, prompt = golden_tensors("target_tiny"), golden_json("target_tiny")["prompt"]
    golden_target.begin(128, WIDTH, 16)
    seen = golden_target.prefill(prompt)
    close = {"rtol": 0, "atol": 2e-4}
    torch.testing.assert_close(seen.hidden, expected["last_hidden"], **close)
    torch.testing.assert_close(golden_target.logits(seen.hidden), expected["logits"], **close)
    torch.testing.assert_close(seen.logits, expected["logits"][-1:], **close)
    taps = seen.taps.unflatten(1, (3, 32)).transpose(0, 1)
    torch.testing.assert_close(taps, expected["tap_hidden"], **close)
    assert list(golden_target.taps) == golden_json("target_tiny")["tap_layer_inputs"]


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_golden_greedy(golden_target, chunk):
    """The golden file's smallest gap between the two best logits is far above the noise."""
    golden = golden_json("target_tiny")
    assert golden["greedy_min_top1_top2_margin"] > 1e-3
    golden_target.begin(128, WIDTH, chunk)
    tokens = [int(golden_target.prefill(golden["prompt"]).logits.argmax())]
    while len(tokens) < 48:
        tokens.append(int(golden_target.verify(torch.tensor(tokens[-1:])).logits.argmax()))
        golden_target.commit(1)
    assert tokens == golden["greedy_48"]


# Constant shapes: bit for bit, so no tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 3, 5, 11])
def test_row_is_the_same_wherever_it_stands_and_whatever_follows(dtype, length):
    """Every token of a text, at every place of a pass of the served width, with junk behind it."""
    target, tokens, prompt = tiny(dtype).target, text(48), 20
    width = chain(chain_length=length).width
    target.begin(128, width, 16)
    target.prefill(tokens[:prompt])
    expected = step_by_step(target, tokens[prompt:])
    wrong = 0
    for start in range(48 - width, prompt - 1, -1):  # backwards, since a pass spoils what was behind it
        true = 1 + start % width
        target.length = start
        passed = target.verify(torch.tensor(tokens[start : start + true] + text(width - true, seed=start)))
        wrong += sum(not same(row(passed, i), expected[start + i - prompt]) for i in range(true))
    assert wrong == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_row_is_the_same_for_any_number_of_threads_at_work(dtype, threads):
    """The library that multiplies matrices cuts its work by the number of threads: with two, float32 rows of
    products 5 to 7 and 9 to 11 wide do differ by place. Few passes, since two threads crawl on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        target, tokens = tiny(dtype).target, text(20 + WIDTH)
        target.begin(64, WIDTH, 32)
        target.prefill(tokens[:20])
        passed = target.verify(torch.tensor(tokens[20:]))
        elsewhere = target.logits(passed.hidden.flip(0)).flip(0)
        expected = step_by_step(target, tokens[20:])
    finally:
        torch.set_num_threads(before)
    assert [i for i in range(WIDTH) if not same(row(passed, i), expected[i])] == []
    assert torch.equal(elsewhere, passed.logits)


def test_rows_of_other_widths_may_differ():
    """Why shapes are constant, and proof that the comparison above can tell."""
    target, tokens = tiny("float32").target, text(40)
    rows = []
    for width in (1, 8):
        target.begin(128, width, 16)
        target.prefill(tokens[:20])
        rows.append(step_by_step(target, tokens[20:]))
    equal = sum(same(a, b) for a, b in zip(*rows, strict=True))
    assert equal < 20
    for a, b in zip(*rows, strict=True):  # float32 noise at logits below 16
        torch.testing.assert_close(a[2], b[2], rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [16, 32])
def test_prefill_may_be_split_at_any_chunk(dtype, cut):
    target, tokens = tiny(dtype).target, text(44)
    target.begin(128, WIDTH, 16)
    whole = target.prefill(tokens[:37])
    after = step_by_step(target, tokens[37:])
    target.begin(128, WIDTH, 16)
    first, second = target.prefill(tokens[:cut]), target.prefill(tokens[cut:37])
    assert torch.equal(torch.cat((first.hidden, second.hidden)), whole.hidden)
    assert torch.equal(torch.cat((first.taps, second.taps)), whole.taps)
    assert torch.equal(second.logits, whole.logits)
    assert all(same(a, b) for a, b in zip(step_by_step(target, tokens[37:]), after, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_any_selection_of_rows(dtype):
    """The prompt's teacher asks for rows in any number and order."""
    target, tokens = tiny(dtype).target, text(30)
    target.begin(128, WIDTH, 16)
    hidden = target.prefill(tokens).hidden
    one_by_one = torch.cat([target.logits(hidden[i : i + 1]) for i in range(30)])
    picked = torch.randperm(30, generator=torch.Generator().manual_seed(0))[:17]
    assert torch.equal(target.logits(hidden[picked]), one_by_one[picked])
    assert target.logits(hidden[:0]).shape == (0, target.vocab_size)


# Roll-back


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", [0, 1, 3, WIDTH])
def test_rejected_tokens_leave_no_trace(dtype, kept):
    target, tokens = tiny(dtype).target, text(45)
    target.begin(128, WIDTH, 16)
    target.prefill(tokens[:20])
    clean = step_by_step(target, tokens[20:])
    target.begin(128, WIDTH, 16)
    target.prefill(tokens[:20])
    target.verify(torch.tensor(text(WIDTH, seed=9)))  # refused whole
    target.commit(0)
    target.verify(torch.tensor(tokens[20 : 20 + kept] + text(WIDTH - kept, seed=8)))
    target.commit(kept)
    rest = step_by_step(target, tokens[20 + kept :])
    assert all(same(a, b) for a, b in zip(rest, clean[kept:], strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_response_leaves_no_trace_in_the_next(dtype):
    """Whatever the last response was, and however long its cache."""
    target, tokens = tiny(dtype).target, text(30)

    def run() -> TargetPass:
        target.begin(64, WIDTH, 16)
        target.prefill(tokens)
        return target.verify(torch.tensor([1, 2, 3]))

    first = run()
    target.begin(256, 12, 32)
    target.prefill(text(200, seed=3))
    again = run()
    assert all(same(row(first, i), row(again, i)) for i in range(3))


# Memory


def test_check_memory(monkeypatch):
    """Eight layers of two heads of eight floats, keys and values: 1024 bytes a row in fp32, half in bf16."""

    def available(free: int) -> None:
        monkeypatch.setattr(module.psutil, "virtual_memory", lambda: SimpleNamespace(available=free))

    available(100 * 1024)
    tiny("float32").target.check_memory(100, 1, 0)
    with pytest.raises(UserError, match=r"caches of 101 tokens, .*decode\.max_new_tokens or target\.context"):
        tiny("float32").target.check_memory(101, 1, 0)
    tiny("bfloat16").target.check_memory(200, 1, 0)
    for fits in ({"caches": 1, "beside": 512}, {"caches": 2, "beside": 0}):
        tiny("bfloat16").target.check_memory(100, **fits)
        with pytest.raises(UserError, match="caches of 101 tokens"):
            tiny("bfloat16").target.check_memory(101, **fits)
    with pytest.raises(UserError, match="caches of 201 tokens, 1 of the target's"):
        tiny("bfloat16").target.check_memory(201, 1, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_of_a_row_is_what_a_cache_takes(dtype):
    target = tiny(dtype).target
    target.begin(96, WIDTH, 16)
    taken = sum(t.nbytes for t in (*target.cache.keys, *target.cache.values))
    c = target.model.config
    itemsize = target.model.norm.weight.element_size()
    assert taken == 96 * target.cache.bytes_per_row(c.layers, c.kv_heads, c.head_dim, itemsize)


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        ("cpu", "int8", "expected one of bfloat16, float16, float32"),
        ("tpu9", "float32", "expected cpu, cuda or cuda:N"),
        pytest.param(
            "cuda", "float32", "this torch sees no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)  # fmt: skip
def test_device_and_dtype_are_checked(device, dtype, message):
    with pytest.raises(UserError, match=message):
        module.check_device(device, dtype)
