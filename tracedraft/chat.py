"""Conversations as the target's own chat template writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracedraft.errors import UserError


def encode(tokenizer: Any, history: Sequence[dict[str, str]]) -> list[int]:
    """Token ids [L] of a history that ends in a user turn, up to where the answer begins.

    Raises:
        UserError: the template refuses the history.
    """
    try:
        text = tokenizer.apply_chat_template(list(history), tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise whatever their author chose
        raise UserError(f"the chat template refuses the conversation: {str(error).splitlines()[0]}") from error
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True)
