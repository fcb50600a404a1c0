"""Random models on disk, as transformers writes them, and the spec that serves such a folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tracedraft.models.tiny import byte_tokenizer
from tracedraft.target import LlamaTarget, LlamaTargetSpec

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def spec(path: Path, cache: Path, **changes) -> LlamaTargetSpec:
    fields = {
        "name": "test", "path": str(path), "revision": None, "wheel": None, "wheel_member": None, "sha256": None,
        "chat_template": None, "device": "cpu", "dtype": "float32", "taps": None, "context": None, "drafts": {},
        "cache": str(cache),
    }  # fmt: skip
    return LlamaTargetSpec(**(fields | changes))


def load(folder: Path, **changes) -> LlamaTarget:
    return spec(folder, folder / "cache", **changes).build().target


def saved(folder: Path, shard: str = "1GB", architecture: str = "llama", **changes) -> PreTrainedModel:
    """A random model, large enough in its weights that logits spread over several units, on disk."""
    tokenizer = byte_tokenizer()
    shape = {"vocab_size": len(tokenizer), "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 7}
    shape |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512}
    config = AutoConfig.for_model(architecture, **(shape | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.25, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.5, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
    model.save_pretrained(folder, max_shard_size=shard)
    tokenizer.save_pretrained(folder)
    return model


def edit_config(folder: Path, **changes) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def assert_same_logits_and_taps(target: LlamaTarget, reference: PreTrainedModel, atol: float) -> None:
    """Prefill, single steps, and passes of which the end is wrong and rolled back, against one plain pass."""
    tokens = torch.randint(target.vocab_size, (70,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        out = reference(tokens[None], output_hidden_states=True)
    expected = out.logits[0]
    assert expected.std() > 1, "logits too flat for the tolerance to mean anything"

    target.begin(96, 6, 16)
    seen = target.prefill(tokens[:41].tolist())  # three chunks, the last one short
    got, taps = [target.logits(seen.hidden)], [seen.taps]
    for at in range(41, 46):
        passed = target.verify(tokens[at : at + 1])
        target.commit(1)
        got.append(passed.logits)
        taps.append(passed.taps)
    at = 46
    for kept in (0, 1, 3, 5, 6, 4, 5):
        piece = tokens[at : at + 6].clone()
        piece[kept:] = (piece[kept:] + 7) % target.vocab_size
        passed = target.verify(piece)
        target.commit(kept)
        got.append(passed.logits[:kept])
        taps.append(passed.taps[:kept])
        at += kept
    assert at == 70
    torch.testing.assert_close(torch.cat(got), expected, rtol=0, atol=atol)
    # hidden_states[i] is the input of layer i
    layers = torch.cat([out.hidden_states[i][0] for i in target.taps], dim=-1)
    torch.testing.assert_close(torch.cat(taps), layers, rtol=0, atol=atol)
