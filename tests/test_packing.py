"""Packed linears: the same products, the same names on disk, and only where nothing is trained."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from checkpoints import saved, spec
from conftest import CPU, chain, recompute, tiny
from run_cases import composed
from torch import Tensor, nn
from torch.nn import functional as F
from training_cases import SPEC

from tracedraft.adapters.fixed import FixedSpec
from tracedraft.decode import respond
from tracedraft.drafts.eagle3 import Eagle3Draft, Eagle3Spec, LogitLensSpec
from tracedraft.meter import Meter
from tracedraft.models import eagle3, packing
from tracedraft.models.packing import PackedLinear, can_pack, cpu_dtype, pack
from tracedraft.target import LlamaTarget
from tracedraft.training.eagle3 import new_draft

PROMPT = list(b"Name three rivers, and a lake.")
DTYPE = cpu_dtype()  # what this machine packs
NAME = str(DTYPE).removeprefix("torch.")
OTHERS = {torch.float32, torch.bfloat16, torch.float16} - {DTYPE}


def linear(size: int, out: int, dtype: torch.dtype = DTYPE, bias: bool = False) -> nn.Linear:
    generator = torch.Generator().manual_seed(size * out)
    made = nn.Linear(size, out, bias=bias).requires_grad_(False)
    made.weight.normal_(generator=generator)
    return made.to(dtype)


needs_packing = pytest.mark.skipif(not can_pack(linear(8, 8)), reason="this CPU or torch packs nothing")


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit on a CPU with bf16 products of its own. One that emulates them sums in another order when packed:
    of 77 shapes 6 then came out different, by up to 0.0016 of the largest entry, and bf16 resolves 0.0039. Sums of
    fp32, which resolves 6e-8, are in another order as well."""
    if torch.cpu._is_avx512_bf16_supported():
        return torch.equal(a, b)
    return bool((a - b).abs().max() <= (0.008 if torch.bfloat16 == DTYPE else 1e-5) * b.abs().max())


def unpacked(target: LlamaTarget) -> LlamaTarget:
    return LlamaTarget(copy.deepcopy(target.model), target.taps, target.eos_ids, target.context)


def kinds(model: nn.Module) -> dict[str, type]:
    found = {name: type(module) for name, module in model.named_modules()}
    return {name: kind for name, kind in found.items() if kind in (nn.Linear, PackedLinear)}


# Products


@needs_packing
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 64])
@pytest.mark.parametrize(("size", "out"), [(32, 64), (33, 257), (576, 960), (1728, 576)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_product_is_the_plain_one(rows, size, out, bias):
    plain = linear(size, out, bias=bias)
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(rows)).to(DTYPE)
    served = PackedLinear(plain.weight, plain.bias)
    assert same(served(x), F.linear(x, plain.weight, plain.bias))
    assert torch.equal(served(x[None]), served(x)[None])


@needs_packing
@pytest.mark.parametrize("width", [1, 8, 16])
def test_a_packed_target_says_what_a_plain_one_says(width):
    """Prefill in chunks, then a pass of each width: taps, hidden states and logits."""
    target, passes = tiny(NAME).target, []
    for each in (target, unpacked(target)):
        each.begin(64, width, 16)
        passes += [each.prefill(PROMPT), each.verify(torch.arange(width))]
    for ours, plain in zip(passes[:2], passes[2:], strict=True):
        assert same(ours.hidden, plain.hidden)
        assert same(ours.taps, plain.taps)
        assert same(ours.logits, plain.logits)


@needs_packing
def test_exact_logits_do_not_depend_on_packing():
    target = tiny(NAME).target
    assert torch.equal(target.exact_logits(PROMPT), unpacked(target).exact_logits(PROMPT))
    assert set(kinds(target.model).values()) == {PackedLinear}


@needs_packing
def test_a_response_is_the_same_with_a_plain_draft():
    target = tiny(NAME).target
    draft, _ = LogitLensSpec("lens", 200, 0).build(target)
    plain = Eagle3Draft(copy.deepcopy(draft.model), draft.embedding)
    made = [
        respond(target, each, FixedSpec("fixed").build(None, 0), PROMPT, chain(), 0, Meter(CPU))
        for each in (draft, plain)
    ]
    assert made[0].tokens == made[1].tokens
    if torch.cpu._is_avx512_bf16_supported():
        assert made[0].accepted_per_round == made[1].accepted_per_round


# What is packed, and what can be read back


@needs_packing
def test_all_of_a_target_is_packed_and_nothing_is_kept_twice():
    model = tiny(NAME).target.model
    assert set(kinds(model).values()) == {PackedLinear}
    assert {name.split(".")[-2] for name, _ in model.named_parameters()} == {
        "embed_tokens", "norm", "input_layernorm", "post_attention_layernorm",
    }  # fmt: skip


@needs_packing
def test_a_loaded_checkpoint_is_packed_and_reads_back(tmp_path):
    """Tied: the embedding stays plain for looking up."""
    reference = saved(tmp_path / "model", tie_word_embeddings=True)
    target = dataclasses.replace(spec(tmp_path / "model", tmp_path), dtype=NAME).build().target
    assert set(kinds(target.model).values()) == {PackedLinear}
    expected = reference.model.embed_tokens.weight.to(DTYPE)
    assert torch.equal(target.model.embed_tokens.weight, expected)
    assert torch.equal(target.model.lm_head.weight, expected)
    down = reference.model.layers[3].mlp.down_proj.weight.to(DTYPE)
    assert torch.equal(target.model.state_dict()["layers.3.mlp.down_proj.weight"], down)


@needs_packing
def test_biases_are_packed_along(tmp_path):
    """Qwen2's, of queries, keys and values."""
    saved(tmp_path / "model", architecture="qwen2")
    target = dataclasses.replace(spec(tmp_path / "model", tmp_path), dtype=NAME).build().target
    assert set(kinds(target.model).values()) == {PackedLinear}
    assert bool(target.model.layers[0].self_attn.qkv_proj.bias.any())
    passes = []
    for each in (target, unpacked(target)):
        each.begin(64, 8, 16)
        passes += [each.prefill(PROMPT), each.verify(torch.arange(8))]
    assert same(passes[0].logits, passes[2].logits)
    assert same(passes[1].logits, passes[3].logits)


@needs_packing
def test_the_draft_s_head_stays_plain_and_learns_in_place():
    draft, _ = LogitLensSpec("lens", 200, 0).build(tiny(NAME).target)
    assert {name for name, kind in kinds(draft.model).items() if kind is nn.Linear} == {"lm_head"}
    features = torch.ones(1, 32).to(DTYPE)
    before = draft.head.logits(features)
    draft.head.weight.mul_(2)
    assert torch.equal(draft.model.lm_head.weight, draft.head.weight)
    assert torch.equal(draft.head.logits(features), 2 * before)


@needs_packing
def test_the_head_s_product_is_with_the_weight_as_it_is(monkeypatch):
    """However the weight was changed, and packed anew only then."""
    draft, _ = LogitLensSpec("lens", 200, 0).build(tiny(NAME).target)
    head, parameter, packed = draft.head, draft.model.lm_head.weight, []
    honest = packing._packed

    def counting(weight: Tensor) -> Tensor:
        packed.append(weight)
        return honest(weight)

    monkeypatch.setattr(packing, "_packed", counting)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).to(DTYPE)
    larger = torch.randn(200, 32, generator=torch.Generator().manual_seed(1)).to(DTYPE)
    changes = [
        lambda: None,
        lambda: head.weight.mul_(2),
        lambda: torch.inference_mode()(head.weight.mul_)(2),
        lambda: head.weight[:3].zero_(),
        lambda: parameter.copy_(larger),
        lambda: parameter.detach().addmm_(larger, larger.t() @ larger),
        lambda: torch._foreach_add_([parameter], 1.0),
        lambda: setattr(head, "weight", larger),
    ]
    for count, change in enumerate(changes, 1):
        change()
        for _ in range(2):
            assert same(head.project(x), F.linear(x, head.weight))
        assert len(packed) == count


@needs_packing
def test_a_served_draft_is_saved_whole(tmp_path):
    target = tiny(NAME).target
    draft, _ = LogitLensSpec("lens", 200, 0).build(target)
    eagle3.save(draft.model, tmp_path / "draft", DTYPE)
    again, _ = Eagle3Spec("eagle3", str(tmp_path / "draft"), None, str(tmp_path)).build(target)
    state, expected = again.model.state_dict(), draft.model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@needs_packing
def test_a_copy_is_plain_and_independent():
    served = nn.Sequential(linear(32, 64, bias=True))
    pack(served)
    weight, bias = served[0].weight, served[0].bias.clone()
    assert list(served.state_dict()) == ["0.weight", "0.bias"]
    plain = copy.deepcopy(served)[0]
    assert type(plain) is nn.Linear
    assert torch.equal(plain.weight, weight)
    assert torch.equal(plain.bias, bias)
    plain.weight.zero_()
    plain.bias.zero_()
    assert torch.equal(served[0].bias, bias)
    served[0].weight.zero_()  # a copy: nothing comes of it
    assert torch.equal(served[0].weight, weight)


# Where nothing can be packed


@pytest.mark.parametrize("dtype", sorted(OTHERS, key=str), ids=str)
def test_other_precisions_stay_plain(dtype):
    plain = linear(8, 8, dtype)
    model = nn.Sequential(plain)
    pack(model)
    assert model[0] is plain


@pytest.mark.parametrize(("instructions", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_the_embedded_model_is_served_in_what_the_cpu_serves_fastest(monkeypatch, instructions, dtype):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: instructions, raising=False)
    assert str(cpu_dtype()) == f"torch.{dtype}"
    assert composed("target=smollm2-135m").target.dtype == dtype
    assert composed("target=smollm2-135m", "target.device=cuda").target.dtype == "bfloat16"
    assert composed("target=smollm2-135m", "target.dtype=float16").target.dtype == "float16"


@pytest.mark.parametrize("missing", ["library", "instructions", "operations"])
def test_without_support_all_stays_plain_and_works(monkeypatch, missing):
    if missing == "library":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    elif missing == "instructions":
        monkeypatch.setattr(packing, "cpu_dtype", lambda: torch.float16)
    else:
        monkeypatch.setattr(torch.ops, "mkldnn", object())
    served = tiny.__wrapped__(NAME)
    draft, _ = LogitLensSpec("lens", 200, 0).build(served.target)
    assert set(kinds(served.target.model).values()) == set(kinds(draft.model).values()) == {nn.Linear}
    monkeypatch.undo()
    usual = tiny(NAME).target
    made = []
    for target in (served.target, usual):
        target.begin(64, 8, 16)
        made.append(target.prefill(PROMPT).logits)
    assert same(made[1], made[0])


# Training


def test_training_meets_no_packed_weights(tmp_path):
    """Neither a new draft nor one to go on from; its head and teacher are the packed target's own weights."""
    target = tiny(NAME).target
    plain = unpacked(target).model.lm_head.weight
    model = new_draft(target, torch.arange(200), SPEC)
    assert torch.equal(model.lm_head.weight, plain[:200].float())
    eagle3.save(model, tmp_path / "draft", DTYPE)
    for dtype in (torch.float32, torch.bfloat16):
        loaded = eagle3.load(Path(tmp_path / "draft"), dtype, "cpu")
        assert set(kinds(loaded).values()) == set(kinds(model).values()) == {nn.Linear}
        assert len(list(loaded.parameters())) == len(list(model.parameters()))


@needs_packing
def test_a_whole_text_scores_the_same_as_packed():
    """The wide passes of training text."""
    target = tiny(NAME).target
    packed, plain = recompute(target, PROMPT), recompute(unpacked(target), PROMPT)
    assert all(same(a, b) for a, b in zip(packed, plain, strict=True))
