"""The routes `/v1/models` and `/v1/models/{model}`."""

import time

from flask import Response
from flask_openapi3.blueprint import APIBlueprint
from pydantic import BaseModel, Field

from api.authentication import SCHEME_NAME
from api.problems import Problem, excerpt
from api.routes.openai.completions import TAG
from api.routes.task_services import TaskServices
from api.schemas.openai.replies import ModelList, ModelView
from api.schemas.replies import PROBLEM_REPLY


class ModelPath(BaseModel):
    """The model."""

    model: str = Field(description="The public name of the model. It may contain slashes.")


def model_routes(services: TaskServices) -> APIBlueprint:
    """The blueprint of `/v1/models`."""
    started = int(time.time())
    settings = services.settings
    routes = APIBlueprint(
        "models",
        __name__,
        url_prefix="/v1/models",
        abp_tags=[TAG],
        abp_security=[{SCHEME_NAME: []}] if settings.keyring else None,
        abp_responses={"default": PROBLEM_REPLY},
    )

    def view() -> ModelView:
        card = services.store.model_card(settings.slug)
        length = card.max_model_len if card else None
        return ModelView(id=settings.public_model, created=started, max_model_len=length)

    @routes.get("", summary="List the models", responses={200: ModelList})
    def list_models() -> Response:
        """The one model of this service, also while no worker is ready."""
        return _json(ModelList(data=[view()]))

    @routes.get("/<path:model>", summary="Get a model", responses={200: ModelView})
    def get_model(path: ModelPath) -> Response:
        """404 for a model that this service does not serve."""
        if path.model != settings.public_model:
            detail = f"this service serves {settings.public_model!r}, not {excerpt(path.model)!r}"
            raise Problem(404, "model_not_found", detail, param="model")
        return _json(view())

    return routes


def _json(body: ModelList | ModelView) -> Response:
    return Response(body.model_dump_json(), content_type="application/json")
