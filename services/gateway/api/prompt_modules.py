"""Prompt modules: texts that prompts are put together from. Each is computed once for its place, and
found again in any prompt."""

from typing import Any

from fastapi import APIRouter, Query, Request

from services.gateway.answering.ask import token_ids_of
from services.gateway.context import context_of
from services.gateway.http.docs import takes
from services.gateway.http.lists import page_of
from services.requests.store.modules.schemas import PromptModulesBody
from services.requests.store.modules.store import ModuleSet, ModuleStore, texts_of
from shared.process.errors import Invalid
from shared.wire.messages import EncodingParams

router = APIRouter(prefix="/v1/prompt_modules")

# their special tokens are text, and no BOS stands before each
ENCODING = EncodingParams(add_special_tokens=False, parse_special_tokens=False)


@router.post("", openapi_extra=takes(PromptModulesBody))
async def create(request: Request) -> dict[str, Any]:
    """Keep a set of modules. The same set has the same id."""
    context, body = await context_of(request).read(request, PromptModulesBody)
    model, texts = context.resolve(body.model), texts_of(body)
    if len(texts) > (max_texts := context.settings.max_requests):
        raise Invalid(f"at most {max_texts} texts in one set here, got {len(texts)}", param="modules")
    token_ids = await token_ids_of(context, model, texts, [ENCODING] * len(texts)) if texts else []
    return (await ModuleStore(context.home).create(context.tenant.tenant_id, model, body, token_ids)).describe()


@router.get("")
async def list_sets(request: Request, after: str | None = None, limit: int = Query(20, ge=1, le=100)) -> dict[str, Any]:
    """The sets that there are, those that were used last first."""
    context = context_of(request)
    module_sets = await ModuleStore(context.home).list_of(context.tenant.tenant_id)
    return page_of(module_sets, after, limit, lambda each: each.set_id, ModuleSet.describe)


@router.get("/{set_id}")
async def retrieve(set_id: str, request: Request) -> dict[str, Any]:
    """A set: its modules, and their places."""
    context = context_of(request)
    return (await ModuleStore(context.home).load(context.tenant.tenant_id, set_id)).describe()


@router.delete("/{set_id}")
async def delete(set_id: str, request: Request) -> dict[str, Any]:
    """Forget a set. What was submitted with it goes on."""
    context = context_of(request)
    await ModuleStore(context.home).delete(context.tenant.tenant_id, set_id)
    return {"id": set_id, "object": "prompt_modules.deleted", "deleted": True}
