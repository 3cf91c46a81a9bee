"""/tokenize, /detokenize, /tokenizer_info: what a prompt becomes, for who counts tokens or builds prompts of ids."""

from __future__ import annotations

from typing import Any

from octavo.cluster.openai.body import Body
from octavo.cluster.openai.config import HttpConfig
from octavo.cluster.openai.messages import normalise_messages
from octavo.cluster.openai.schemas import template_kwargs
from octavo.cluster.openai.tools import tools_of
from octavo.cluster.tokenizer import Tokenizer
from octavo.protos.errors import InvalidRequestError, RequestTooLargeError
from octavo.protos.types import ModelInfo, checked_prompt_ids

_TOKENS_TOLD = ("bos_token", "eos_token", "pad_token", "unk_token")
TOKENS_PER_CONTEXT = 16
"""Texts of up to so many times the model's limit are tokenised: helpers may look at more than fits, not at all."""


async def tokenize(body: Body, tokenizer: Tokenizer, model: ModelInfo, config: HttpConfig) -> dict[str, Any]:
    """The reply to a "prompt" (text) or "messages". Raises `InvalidRequestError` naming the field."""
    chat = "messages" in body
    if chat == ("prompt" in body):
        raise InvalidRequestError("give either prompt or messages", param="prompt")
    special = body.flag("add_special_tokens", not chat)
    generation_prompt = body.flag("add_generation_prompt", True)
    prompt = "" if chat else body.text("prompt", chars_max=config.body_bytes_max) or ""
    messages = body.any("messages")
    tools = tools_of(body) if chat else None
    kwargs = template_kwargs(body) if chat else {}

    def work() -> list[int]:
        text = prompt
        if chat:
            clean = normalise_messages(messages, config.messages_per_request_max)
            text = tokenizer.render_chat(
                clean,
                add_generation_prompt=generation_prompt,
                kwargs=kwargs,
                tools=tools.definitions if tools is not None else None,
            )
        if tokenizer.fewest_tokens(text) > TOKENS_PER_CONTEXT * model.max_model_len:
            raise RequestTooLargeError("the text is too long to tokenise here", param="prompt")
        return tokenizer.encode(text, special)

    ids = await tokenizer.run(work)
    reply: dict[str, Any] = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}
    if body.flag("return_token_strs"):
        reply["token_strs"] = [tokenizer.token_text(token) for token in ids]
    return reply


def tokenizer_info(tokenizer: Tokenizer, model: ModelInfo) -> dict[str, Any]:
    """What evaluation harnesses ask of a tokenizer that they reach over HTTP only, in vLLM's form."""
    template = tokenizer.chat_template
    return {
        **{name: tokenizer.special_tokens.get(name) for name in _TOKENS_TOLD},
        "chat_template": None if template is None else template.source,
        "model_max_length": model.max_model_len,
        "vocab_size": model.vocab_size,
    }


async def detokenize(body: Body, tokenizer: Tokenizer, model: ModelInfo) -> dict[str, Any]:
    """The reply to "tokens". Raises `InvalidRequestError` naming the field."""
    tokens = body.any("tokens")
    if not isinstance(tokens, list):
        raise InvalidRequestError(f"tokens must be a list of token ids, got {tokens!r:.80}", param="tokens")
    skip_special = body.flag("skip_special_tokens")
    ids = checked_prompt_ids(tokens, model.vocab_size, param="tokens").tolist()
    return {"prompt": await tokenizer.run(lambda: tokenizer.decode(ids, skip_special))}
