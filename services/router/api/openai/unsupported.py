"""Top-level fields of other servers' APIs that change the answer and that Slipstream does not have. Pure.

A field of this table is refused by name, unless it holds a value that asks for nothing. A field that stands
in no table is ignored and named in the answer's header: hints and options of next year break no client.
"""

from __future__ import annotations

from collections.abc import Mapping

# Each field with the values besides null that ask for nothing.
_OPENAI: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "background": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "web_search_options": (),
}
_VLLM: Mapping[str, tuple[object, ...]] = {
    "add_special_tokens": (False, True),  # Kimi's template and text have none to add
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "cache_salt": ("",),  # it promises that no other request shares the KV
    "chat_template": ("",),
    "documents": ([],),
    "early_stopping": (False,),
    "guided_json_object": (False,),
    "guided_whitespace_pattern": ("",),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "structural_tag": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
_SGLANG: Mapping[str, tuple[object, ...]] = {
    "custom_logit_processor": ("",),
    "ebnf": (),
    "input_ids": (),
    "json_schema": (),
    "lora_path": ("",),
    "no_stop_trim": (False,),
    "regex": (),
    "return_hidden_states": (False,),
    "separate_reasoning": (True,),
    "session_params": ({},),
    "stop_regex": ("", []),
}
# llama.cpp, TGI, OpenRouter, Ollama, Qwen's and Gemini's APIs, and transformers.
_OTHERS: Mapping[str, tuple[object, ...]] = {
    "do_sample": (True,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "eos_token_id": (),
    "format": ("",),
    "grammar": ("",),
    "max_length": (),
    "max_new_tokens": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "mirostat": (0,),
    "models": ([],),
    "n_predict": (),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_predict": (),
    "plugins": ([],),
    "reasoning_budget": (),
    "repeat_penalty": (1,),
    "response_schema": (),
    "tfs_z": (1,),
    "thinking_budget": (),
    "top_a": (0,),
    "transforms": ([],),
    "truncate": (),
    "typical_p": (1,),
    "xtc_probability": (0,),
}

# Media beside the messages, as Ollama and models of Workers AI take them.
_MEDIA: Mapping[str, tuple[object, ...]] = {
    "image": ("", []),
    "image_b64": ("",),
    "image_url": ("",),
    "images": ("", []),
    "video": ("", []),
}

# Texts for the model that other endpoints take under these names, and completions never read.
TEXTS_ELSEWHERE: Mapping[str, tuple[object, ...]] = {
    "input": ("", []),
    "instructions": ("", []),
    "system": ("", []),
}
# vLLM's fields that both kinds of completions have, and no other endpoint.
OF_COMPLETIONS_ONLY: Mapping[str, tuple[object, ...]] = {"prompt_logprobs": ()}
# vLLM's fields that chat completions have, and no other endpoint.
OF_CHAT_ONLY: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
# The switches of reasoning that chat completions take, and no other endpoint of OpenAI's shape.
SWITCHES_OF_CHAT: Mapping[str, tuple[object, ...]] = {
    "chat_template_kwargs": ({},),
    "enable_thinking": (),
    "reasoning_effort": (),
    "thinking": (),
}
ANSWER_CHANGING: Mapping[str, tuple[object, ...]] = {**_OPENAI, **_VLLM, **_SGLANG, **_OTHERS, **_MEDIA}
