"""GET /v1/models and GET /v1/models/<id>."""

import time
from typing import Any

from flask import Flask, Response

from common.wire import ModelInfo
from web.answers import json_bytes
from web.prepare import check_model
from web.routes.service import Service


def register(app: Flask, service: Service) -> None:
    """Add the routes."""
    created = int(time.time())

    @app.get("/v1/models")
    def models() -> Response:
        body = {"object": "list", "data": [_model_json(service.model, created)]}
        return Response(json_bytes(body), mimetype="application/json")

    @app.get("/v1/models/<path:model_id>")
    def model(model_id: str) -> Response:
        check_model(model_id, service.model)
        return Response(json_bytes(_model_json(service.model, created)), mimetype="application/json")


def _model_json(model: ModelInfo, created: int) -> dict[str, Any]:
    return {
        "id": model.id,
        "object": "model",
        "created": created,
        "owned_by": "tokenloom",
        "max_model_len": model.max_model_len,
    }
