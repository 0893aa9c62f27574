"""GET /v1/models and GET /v1/models/<id>."""

import time
from typing import Any

from flask import Flask, Response

from web.answers import json_bytes
from web.prepare import check_model
from web.routes.service import Service


def register(app: Flask, service: Service) -> None:
    """Add the routes."""
    created = int(time.time())

    @app.get("/v1/models")
    def models() -> Response:
        body = {"object": "list", "data": [_model_json(service, created)]}
        return Response(json_bytes(body), mimetype="application/json")

    @app.get("/v1/models/<path:model_id>")
    def model(model_id: str) -> Response:
        check_model(model_id, service.model)
        return Response(json_bytes(_model_json(service, created)), mimetype="application/json")


def _model_json(service: Service, created: int) -> dict[str, Any]:
    model = service.model
    return {
        "id": model.id,
        "object": "model",
        "created": created,
        "owned_by": "tokenloom",
        "max_model_len": model.max_model_len,
        "chat_template": service.texts.of(model).has_chat_template,
    }
