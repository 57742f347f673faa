"""The model card: the names, context, vocabulary and default sampling of the model that the router serves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libs.common.cluster.fingerprint import TEMPLATE, tokenizer_digest
from libs.text.model_files import read_object_file
from libs.text.special_tokens import ANSWER_ENDS
from libs.text.tokenizer import Tokenizer
from services.router.request.tokenizer_config import read_tokenizer_config
from slipstream.bound import shown
from slipstream.errors import InvalidArgument
from slipstream.sampling import SAMPLING_DEFAULTS, SAMPLING_RANGES
from slipstream.v1 import common_pb2

# The plain sampling fields for which generation_config.json may state defaults.
_STATED = ("temperature", "top_p", "top_k")


def _no_limit() -> int | None:
    return None


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The model served. `stop_token_ids` end an answer: Kimi's `<|im_end|>` and its equivalents.

    `thinks`: the model reasons first unless a request says otherwise, as K2.5 does.
    """

    name: str
    tokenizer: Tokenizer
    vocab_size: int
    model_context_tokens: int
    created_unix_s: int
    stop_token_ids: tuple[int, ...]
    tokenizer_digest: str  # the router uses no worker with another tokenizer
    sampling_defaults: Mapping[str, float]  # the plain sampling fields of a request that states none
    aliases: tuple[str, ...] = ()
    thinks: bool = True
    model_dir: Path | None = None  # None: no grammar can be checked
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)  # as `read_tokenizer_config` reads it
    workers_context_tokens: Callable[[], int | None] = _no_limit  # None: as the model's

    @property
    def max_context_tokens(self) -> int:
        """The tokens of a prompt and its answer: what the model has, or less where its workers take less."""
        of_workers = self.workers_context_tokens()
        return self.model_context_tokens if of_workers is None else min(self.model_context_tokens, of_workers)

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which requests may call the model."""
        return (self.name, *self.aliases)

    def edge_token(self, name: str) -> int | None:
        """The token that begins or ends a text, by its name; None for any other text."""
        edges = (self.tokenizer_config.get("bos_token"), self.tokenizer_config.get("eos_token"))
        return self.tokenizer.special_ids.get(name) if name in edges else None

    def fits(self, fingerprint: common_pb2.Fingerprint) -> bool:
        """Whether a worker has this tokenizer and template; an empty field of its fingerprint matches."""
        same_tokenizer = fingerprint.tokenizer in ("", self.tokenizer_digest)
        return same_tokenizer and fingerprint.template in ("", TEMPLATE)


def load_model_card(model_dir: Path, *, names: Sequence[str] = (), thinks: bool | None = None) -> ModelCard:
    """Read a checkpoint directory: config.json, generation_config.json (may be missing), the tokenizer.

    `names`: the model's name and its aliases, by default the directory's name. `thinks` None: on, unless
    generation_config.json has `"thinking": false`. K2.5's config.json holds the language model's part under
    `text_config`. Raises OSError, ValueError, InvalidArgument.
    """
    config = read_object_file(model_dir / "config.json")
    text = config.get("text_config", config)
    tokenizer = Tokenizer.from_dir(model_dir)
    try:
        context = int(text["max_position_embeddings"])
        vocab_size = int(text["vocab_size"])
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"{model_dir}: config.json lacks a number: {error}") from error
    if vocab_size < tokenizer.vocab_size:
        raise ValueError(f"{model_dir}: {tokenizer.vocab_size} token ids for a vocabulary of {vocab_size}")
    generation_path = model_dir / "generation_config.json"
    generation = read_object_file(generation_path) if generation_path.exists() else {}
    stops = {tokenizer.special_ids[name] for name in ANSWER_ENDS if name in tokenizer.special_ids}
    return ModelCard(
        name=names[0] if names else model_dir.resolve().name,
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        model_context_tokens=context,
        created_unix_s=int((model_dir / "config.json").stat().st_mtime),
        stop_token_ids=tuple(sorted(stops)),
        tokenizer_digest=tokenizer_digest(model_dir),
        sampling_defaults={**SAMPLING_DEFAULTS, **_stated_sampling(generation_path, generation)},
        aliases=tuple(names[1:]),
        thinks=generation.get("thinking", True) is not False if thinks is None else thinks,
        model_dir=model_dir,
        tokenizer_config=read_tokenizer_config(model_dir),
    )


def _stated_sampling(path: Path, generation: Mapping[str, Any]) -> dict[str, float]:
    """The sampling defaults of generation_config.json, where a null states none. Raises InvalidArgument for a
    value that no request may have."""
    stated: dict[str, float] = {}
    for name in _STATED:
        value = generation.get(name)
        if value is None:
            continue
        if name == "top_k" and value == -1:  # off, as over HTTP
            value = 0
        allowed, kind = SAMPLING_RANGES[name], type(SAMPLING_DEFAULTS[name])
        is_number = type(value) is int or (isinstance(value, float) and math.isfinite(value))
        if not is_number or (allowed.whole and value != int(value)):
            raise InvalidArgument(f"{path}: {name}", f"{allowed.words}, not {shown(value)}")
        allowed.check(value, f"{path}: {name}")
        stated[name] = kind(value)
    return stated
