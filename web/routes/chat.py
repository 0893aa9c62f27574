"""POST /v1/chat/completions."""

from flask import Flask, Response

from web.answers import ChatFormat
from web.prepare import call_specs, check_model, encode_chat
from web.routes.answer import answer
from web.routes.body import read_json
from web.routes.service import Service
from web.schema.base import parse
from web.schema.chat import ChatRequest


def register(app: Flask, service: Service) -> None:
    """Add the route."""

    @app.post("/v1/chat/completions")
    def chat_completions() -> Response:
        asked = parse(ChatRequest, read_json())
        model = service.model
        check_model(asked.model, model)
        text = service.texts.of(model)
        prompt_ids = encode_chat(asked, model, text)
        specs = call_specs(asked, [prompt_ids], "messages", model, text.tokenizer)
        return answer(
            service,
            asked,
            specs,
            model,
            text,
            ChatFormat(text.tokenizer.token_bytes if asked.num_logprobs is not None else None),
            "chatcmpl",
        )
