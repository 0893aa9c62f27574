"""POST /tokenize and POST /detokenize: what the model's tokenizer and chat template make of a text or a chat."""

from typing import Any

from flask import Flask, Response

from common.errors import ErrorCode, RequestError
from common.wire import ModelInfo
from web.answers import json_bytes
from web.prepare import check_model, encode_chat, refuse_hopeless
from web.routes.body import read_json
from web.routes.service import Service
from web.schema.base import parse
from web.schema.chat import ChatRequest
from web.schema.tokenize import DetokenizeRequest, TokenizeRequest
from web.text.model_text import ModelText


def register(app: Flask, service: Service) -> None:
    """Add the routes."""

    @app.post("/tokenize")
    def tokenize() -> Response:
        body = read_json()
        asked = parse(TokenizeRequest, body)
        model = service.model
        check_model(asked.model, model)
        text = service.texts.of(model)
        ids = (
            encode_chat(parse(ChatRequest, body), model, text)
            if asked.text is None
            else _encode_text(asked, model, text)
        )
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}
        if asked.return_token_strs:
            pieces = (text.tokenizer.token_bytes.of(token_id) for token_id in ids)
            answer["token_strs"] = [piece.decode("utf-8", "replace") for piece in pieces]
        return Response(json_bytes(answer), mimetype="application/json")

    @app.post("/detokenize")
    def detokenize() -> Response:
        asked = parse(DetokenizeRequest, read_json())
        model = service.model
        check_model(asked.model, model)
        ids = asked.tokens or []
        if ids and max(ids) >= model.vocab_size:
            raise RequestError(ErrorCode.INVALID_REQUEST, "tokens: has token ids outside the vocabulary", "tokens")
        text = service.texts.of(model).tokenizer.decode(ids)
        # vLLM's clients look for `prompt`, llama-server's for `content`.
        return Response(json_bytes({"prompt": text, "content": text}), mimetype="application/json")


def _encode_text(asked: TokenizeRequest, model: ModelInfo, text: ModelText) -> list[int]:
    source = asked.text or ""
    refuse_hopeless(source, "content" if asked.prompt is None else "prompt", model, text.tokenizer)
    return text.tokenizer.encode(source) if asked.with_special_tokens else text.tokenizer.encode_bare(source)
