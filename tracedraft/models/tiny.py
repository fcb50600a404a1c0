"""A random target of a few thousand weights with a byte-level tokenizer, for tests and dry runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tracedraft.models.decoder import Decoder, DecoderConfig
from tracedraft.models.packing import pack
from tracedraft.target import DTYPES, LlamaTarget, Served, check_device, default_taps
from tracedraft.types import TargetShape

HIDDEN = 32
LAYERS = 8
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Any:
    """One id for each byte, then the two markers of the chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@dataclass(frozen=True)
class TinyTargetSpec:
    """Eight layers of 32; ``seed`` draws the weights."""

    name: str
    seed: int
    device: str
    dtype: str
    context: int
    drafts: dict[str, str | None]

    def shape(self) -> TargetShape:
        return TargetShape(HIDDEN, len(byte_tokenizer()), 3, default_taps(LAYERS), LAYERS)

    def provenance(self) -> dict[str, str | None]:
        return {"origin": f"random, seed {self.seed}", "sha256": None, "revision": None}

    def build(self) -> Served:
        check_device(self.device, self.dtype)
        tokenizer = byte_tokenizer()
        config = DecoderConfig(
            vocab_size=len(tokenizer),
            hidden_size=HIDDEN,
            intermediate_size=64,
            layers=LAYERS,
            heads=4,
            kv_heads=2,
            head_dim=8,
            eps=1e-5,
            rope_theta=10000.0,
            rope_scaling=None,
            tied=False,
            context=self.context,
        )
        model = Decoder(config)
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0.0, 0.3, generator=generator)
        model.to(self.device, DTYPES[self.dtype]).requires_grad_(False).eval()
        pack(model)
        eos = frozenset({tokenizer.eos_token_id})
        target = LlamaTarget(model, default_taps(config.layers), eos, self.context)
        return Served(target, tokenizer, self.provenance())
