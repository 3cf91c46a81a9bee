"""Fields that OpenAI's API or vLLM's know and that are not served here, by path: each with the values that ask for
nothing, and so are let through. Others are refused by name, because an answer that silently lacks them would be wrong.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

_EVERYWHERE: dict[str, Collection[Any]] = {
    "use_beam_search": (False,),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "lora_path": (),
    "vllm_xargs": (),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": (),
    "prompt_embeds": (),
    "thinking_token_budget": (),
}
COMPLETIONS: dict[str, Collection[Any]] = {**_EVERYWHERE, "suffix": ("",)}

FORK: dict[str, Collection[Any]] = {
    **COMPLETIONS,
    "prompt": (),
    "messages": (),
    "echo": (False,),
}

CHAT: dict[str, Collection[Any]] = {
    **_EVERYWHERE,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": ([], ["text"]),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "moderation": (),
    "store": (False,),
    "echo": (False,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "include_reasoning": (True, False),
}

RESPONSES: dict[str, Collection[Any]] = {
    **_EVERYWHERE,
    "response_format": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "n": (1,),
    "best_of": (1,),
    "beam_width": (),
    "length_penalty": (),
    "early_stopping": (),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "return_token_ids": (False,),
    "prompt_logprobs": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "max_tool_calls": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "include": ([],),
    "reasoning": ({}, {"effort": "none"}),
    "truncation": ("disabled",),
    "moderation": (),
    "image": (),
    "access_programs": (),
}
