"""Conversations as the target's own chat template writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracedraft.errors import UserError


def render(tokenizer: Any, messages: Sequence[dict[str, str]], opened: bool) -> str:
    """Messages as text; ``opened``, up to where an answer to the last one begins.

    Raises:
        UserError: the template refuses them.
    """
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=opened)
    except Exception as error:  # templates raise whatever their author chose
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"the target's chat template refuses it: {reason}") from error


def encode(tokenizer: Any, history: Sequence[dict[str, str]]) -> list[int]:
    """Token ids [L] of a history that ends in a user turn, up to where the answer begins.

    Raises:
        UserError: the template refuses the history.
    """
    return tokenizer(render(tokenizer, history, True), add_special_tokens=False)["input_ids"]


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True)
