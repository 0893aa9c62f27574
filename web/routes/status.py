"""GET /health: this process lives. GET /ready: a request sent now would be served. GET /version: of this server."""

from flask import Flask, Response

from common import __version__
from common.errors import ErrorCode, RequestError
from web.answers import json_bytes
from web.routes.service import Service


def register(app: Flask, service: Service) -> None:
    """Add the routes."""

    @app.get("/health")
    def health() -> Response:
        return Response(json_bytes({"status": "ok"}), mimetype="application/json")

    @app.get("/version")
    def version() -> Response:
        return Response(json_bytes({"version": __version__}), mimetype="application/json")

    @app.get("/ready")
    def ready() -> Response:
        if not service.link.ready:
            raise RequestError(ErrorCode.NOT_READY, service.link.why_not_ready())
        # The tokenizer is loaded here at the latest, so that the first user need not wait for it.
        model = service.model
        service.texts.of(model)
        return Response(json_bytes({"status": "ready", "model": model.id}), mimetype="application/json")
