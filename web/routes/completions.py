"""POST /v1/completions."""

from flask import Flask, Response

from common.wire import ModelInfo
from web.answers import CompletionFormat
from web.prepare import call_specs, check_model, refuse_hopeless
from web.routes.answer import answer
from web.routes.body import read_json
from web.routes.service import Service
from web.schema.base import parse
from web.schema.completions import CompletionRequest
from web.text.model_text import ModelText


def register(app: Flask, service: Service) -> None:
    """Add the route."""

    @app.post("/v1/completions")
    def completions() -> Response:
        asked = parse(CompletionRequest, read_json())
        model = service.model
        check_model(asked.model, model)
        text = service.texts.of(model)
        prompts = [_encode(prompt, text, model) if isinstance(prompt, str) else prompt for prompt in asked.prompts]
        specs = call_specs(asked, prompts, "prompt", model, text.tokenizer)
        return answer(
            service,
            asked,
            specs,
            model,
            text,
            CompletionFormat(text.tokenizer.token_bytes if asked.num_logprobs is not None else None),
            "cmpl",
        )


def _encode(prompt: str, text: ModelText, model: ModelInfo) -> list[int]:
    refuse_hopeless(prompt, "prompt", model, text.tokenizer)
    return text.encode_prompt(prompt)
