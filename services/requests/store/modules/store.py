"""Sets of prompt modules, in Redis: a hash each, with the set's description and each module's tokens.

A set's id is a hash of its contents. So a set never changes, and a client that posts it again gets the
same id.
"""

import hashlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import redis.asyncio

from services.requests.bodies.fields import TokenIds, shortened
from services.requests.store.client import redis_errors_as_503
from services.requests.store.modules.schemas import MAX_POSITION, PromptModulesBody, UsedModules
from shared.model.context_length import context_exceeded
from shared.process.errors import Invalid, Rejected
from shared.process.host_memory import size_text
from shared.wire.messages import ModulePart, PromptModule
from shared.wire.script import load_script, table
from shared.wire.streams import module_set_key, module_sets_key

PARAM = "prompt_modules"
MAX_SETS = 256  # of one owner
MAX_BYTES = 64 << 20  # of one owner's
TTL_S = 30 * 24 * 3600  # after its last use
SET_ID = re.compile(r"pm-[0-9a-f]{24}")
ABOUT = "about"  # the field with the set's description; each other field has a module's parts, by its name
PREFIX = "module:"

CREATE_MODULES = load_script("create_modules")


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """A module as the API describes it."""

    name: str
    position: int
    num_positions: int  # of its texts, and of the rooms for arguments
    entry: int  # of the set's list: modules of one entry are a union
    parameters: dict[str, int]  # and the tokens that each one's argument may have

    @property
    def end(self) -> int:
        return self.position + self.num_positions


@dataclass(frozen=True, slots=True)
class ModuleSet:
    """A set of modules, as the API has it."""

    set_id: str
    model: str
    created_at: int
    num_bytes: int
    modules: list[ModuleFacts]

    def describe(self) -> dict[str, Any]:
        modules = [
            {
                "name": each.name,
                "position": each.position,
                "num_positions": each.num_positions,
                "parameters": each.parameters,
            }
            for each in self.modules
        ]
        end = max(each.end for each in self.modules)
        return {
            "id": self.set_id,
            "object": "prompt_modules",
            "created_at": self.created_at,
            "model": self.model,
            "num_positions": end,
            "modules": modules,
        }


@dataclass(frozen=True, slots=True)
class ModuleStore:
    """The sets of prompt modules."""

    client: "redis.asyncio.Redis"

    async def create(self, owner: str, model: str, body: PromptModulesBody, token_ids: Sequence[TokenIds]) -> ModuleSet:
        """Keep a set. token_ids: of each text of its modules, in order. Raises Invalid if it is too long,
        Rejected (429) if the owner has too many."""
        modules, parts = placed(body, token_ids)
        values = {PREFIX + name: orjson.dumps(each) for name, each in parts.items()}
        facts = [[each.name, each.position, each.num_positions, each.entry, each.parameters] for each in modules]
        digest = hashlib.blake2b(orjson.dumps([model, facts, parts]), digest_size=12).hexdigest()
        num_bytes = sum(map(len, values.values())) + len(orjson.dumps(facts))
        set_id = f"pm-{digest}"
        about = orjson.dumps({"model": model, "created_at": int(time.time()), "num_bytes": num_bytes, "modules": facts})
        fields = [each for pair in {ABOUT: about, **values}.items() for each in pair]
        keys = module_set_key(owner, set_id), module_sets_key(owner)
        asked = table(id=set_id, now=time.time(), ttl=TTL_S, max_sets=MAX_SETS, max_bytes=MAX_BYTES, size=num_bytes)
        with redis_errors_as_503():
            is_kept = await CREATE_MODULES.run(self.client, keys, asked, *fields)
        if not is_kept:
            reason = (
                f"at most {MAX_SETS} sets of prompt modules with {size_text(MAX_BYTES)} are kept for a key: delete some"
            )
            raise Rejected(reason, status=429, retry_after_s=60, code="storage_limit_exceeded")
        return await self.load(owner, set_id)

    async def load(self, owner: str, set_id: str, param: str = "id") -> ModuleSet:
        """Raises Invalid (404)."""
        about: Any = None
        with redis_errors_as_503():
            if SET_ID.fullmatch(set_id):
                about = await self.client.hget(module_set_key(owner, set_id), ABOUT)
        if about is None:
            raise not_there(set_id, param)
        return decode(set_id, about)

    async def list_of(self, owner: str) -> list[ModuleSet]:
        """All sets of the owner, the last used first."""
        with redis_errors_as_503():
            members: Any = await self.client.zrevrange(module_sets_key(owner), 0, -1)
            async with self.client.pipeline(transaction=False) as pipe:
                ids = [member.decode().partition("/")[2] for member in members]
                for set_id in ids:
                    pipe.hget(module_set_key(owner, set_id), ABOUT)
                found: Any = await pipe.execute() if ids else []
        return [decode(set_id, about) for set_id, about in zip(ids, found, strict=True) if about is not None]

    async def delete(self, owner: str, set_id: str) -> None:
        """Raises Invalid (404). Requests that were submitted with it go on."""
        found = await self.load(owner, set_id)
        with redis_errors_as_503():
            async with self.client.pipeline(transaction=True) as pipe:
                pipe.delete(module_set_key(owner, set_id))
                pipe.zrem(module_sets_key(owner), member_of(found))
                await pipe.execute()

    async def take(self, owner: str, model: str, used: UsedModules, longest: int | None) -> tuple[PromptModule, ...]:
        """The modules that a prompt of this model uses, with its arguments. longest: the model's
        context, if it is known. Raises Invalid."""
        found = await self.load(owner, used.id, f"{PARAM}.id")
        if found.model != model:
            raise Invalid(
                f"the prompt modules {found.set_id} are of the model {found.model}, not of {model}", param=f"{PARAM}.id"
            )
        facts = {each.name: each for each in found.modules}
        check_use(used, facts)
        names = [each.name for each in used.use]
        reach = max(sum(facts[name].num_positions for name in names), *(facts[name].end for name in names))
        if longest is not None and reach >= longest:
            raise context_exceeded(PARAM, longest, reach, 1)
        key = module_set_key(owner, found.set_id)
        with redis_errors_as_503():
            async with self.client.pipeline(transaction=False) as pipe:
                pipe.hmget(key, [PREFIX + name for name in names])
                pipe.expire(key, TTL_S)
                pipe.expire(module_sets_key(owner), TTL_S)
                pipe.zadd(module_sets_key(owner), {member_of(found): time.time()}, xx=True)
                parts: Any = (await pipe.execute())[0]
        if None in parts:  # it was deleted just now
            raise not_there(used.id, f"{PARAM}.id")
        return tuple(
            PromptModule(
                each.name, facts[each.name].end, tuple(part_of(part, each.arguments) for part in orjson.loads(packed))
            )
            for each, packed in zip(used.use, parts, strict=True)
        )


def placed(body: PromptModulesBody, token_ids: Sequence[TokenIds]) -> tuple[list[ModuleFacts], dict[str, list[Any]]]:
    """The modules with their positions; and by name the parts of each: positions and tokens, or
    positions, parameters and their rooms. Raises Invalid."""
    texts, modules, parts, next_position = iter(token_ids), list[ModuleFacts](), dict[str, list[Any]](), 0
    for number, entry in enumerate(body.modules):
        position = entry.position if entry.position is not None else next_position
        ends = []
        for module in entry.members:
            end, own = position, list[Any]()
            for piece in module.pieces():
                ids = next(texts) if not piece.parameter else np.zeros(0, np.int32)
                own.append([end, ids.tolist()] if not piece.parameter else [end, piece.parameter, piece.room])
                end += piece.room or len(ids)
            if not any(isinstance(part[1], str) or part[1] for part in own):
                raise Invalid(f"the text of the module {module.name} has no tokens", param="modules")
            parts[module.name] = [part for part in own if part[1]]
            modules.append(ModuleFacts(module.name, position, end - position, number, dict(module.parameters)))
            ends.append(end)
        next_position = max(ends)
        if next_position > MAX_POSITION:
            raise Invalid(f"the modules reach beyond position {MAX_POSITION}", param="modules")
    return modules, parts


def texts_of(body: PromptModulesBody) -> list[str]:
    """The texts of all modules, in the order in which `create` takes their tokens."""
    return [piece.text for module in body.all_modules() for piece in module.pieces() if not piece.parameter]


def check_use(used: UsedModules, facts: dict[str, ModuleFacts]) -> None:
    """Raises Invalid for modules and arguments that are not in the set, or two of a union."""
    taken: dict[int, str] = {}
    for number, each in enumerate(used.use):
        param = f"{PARAM}.use[{number}]"
        if each.name not in facts:
            raise Invalid(f"the set has no module {shortened(each.name)!r}", param=param)
        if unknown := next((name for name in each.arguments if name not in facts[each.name].parameters), None):
            raise Invalid(f"the module {each.name} has no parameter {shortened(unknown)!r}", param=param)
        if other := taken.get(facts[each.name].entry):
            raise Invalid(f"{other} and {each.name} are of one union: a prompt takes one of them", param=param)
        taken[facts[each.name].entry] = each.name


def part_of(part: list[Any], arguments: dict[str, str]) -> ModulePart:
    """A part in Redis' form, with its argument."""
    position, ids, *room = part
    if room:
        return ModulePart(position, np.zeros(0, np.int32), ids, arguments.get(ids, ""), room[0])
    return ModulePart(position, np.array(ids, np.int32))


def decode(set_id: str, about: bytes) -> ModuleSet:
    values = orjson.loads(about)
    modules = [ModuleFacts(*each) for each in values["modules"]]
    return ModuleSet(set_id, values["model"], values["created_at"], values["num_bytes"], modules)


def not_there(set_id: str, param: str) -> Invalid:
    reason = f"no prompt modules {shortened(set_id)!r}"
    return Invalid(reason, param=param, code="prompt_modules_not_found", status=404)


def member_of(found: ModuleSet) -> str:
    return f"{found.num_bytes}/{found.set_id}"
