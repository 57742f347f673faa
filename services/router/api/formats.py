"""The formats of answers by the path of their endpoint: what HTTP serves, and what a stored body can name."""

from __future__ import annotations

from collections.abc import Mapping

from services.router.api.answers.answer_format import AnswerFormat
from services.router.api.openai.answer_format import CHAT_COMPLETIONS, COMPLETIONS

FORMATS: Mapping[str, AnswerFormat] = {
    "/v1/chat/completions": CHAT_COMPLETIONS,
    "/v1/completions": COMPLETIONS,
}
