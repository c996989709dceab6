"""The bodies of llama.cpp's server, as those of a completion here."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from services.requests.bodies.body import OF_LLAMA_CPP, Body, Table
from services.requests.bodies.fields import (
    MAX_INPUTS,
    MAX_NAME,
    MAX_SEQUENCES,
    TokenIds,
    at,
    at_most,
    kind_of,
    read_token_ids,
    whole,
    whole_items,
)
from services.requests.bodies.parameters import given_values, takes_parameters
from services.requests.dialects.openai.schemas import MAX_USER, description_of
from services.requests.dialects.openai.translate import as_llama_reads
from shared.model.sampling_params import MAX_LOGIT_BIAS, parameter
from shared.process.errors import Invalid

Json = dict[str, Any]
Pieces = list[str | TokenIds]  # of one prompt, in their order
Biases = list[tuple[int | str, float]]

DEFAULTS: Json = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}  # llama.cpp's own
RANDOM_SEED = (1 << 32) - 1  # -1 to llama.cpp, whose seeds have 32 bits
MAX_FIELDS = 64  # response_fields
NEVER = -100.0  # the least bias that a token can have
MAX_PIECES = 4096  # of a prompt that mixes texts and token ids
MAX_EXTRA = 1024  # files that an infill is told of
# What a completion calls the other fields
RENAMED = {"stream": "stream", "user": "user", "n_cmpl": "n", "return_tokens": "return_token_ids"}


def read_prompts(value: Any, most: int = MAX_SEQUENCES) -> list[Pieces]:
    """One prompt or several, each a text, token ids, or both mixed. A list with a list or an object
    in it holds several. most: of them."""
    if isinstance(value, list) and any(isinstance(each, list | dict) for each in value):
        return [read_pieces(each, f"[{index}]") for index, each in enumerate(_bounded(value, most))]
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return [[each] for each in _bounded(value, most)]
    return [read_pieces(value, "")]


def read_inputs(value: Any) -> list[Pieces]:
    """The texts or tokens that vectors are made of, as prompts are read."""
    return read_prompts(value, MAX_INPUTS)


Inputs = Annotated[list[Pieces] | None, PlainValidator(read_inputs), WithJsonSchema({})]


def _bounded(value: list[Any], most: int) -> list[Any]:
    if len(value) > most:
        raise at("", f"at most {most} prompts in one request, got {len(value)}")
    return value


def read_pieces(value: Any, path: str) -> Pieces:
    """One prompt: a text, token ids, a mixture, or an object with a `prompt_string`."""
    if isinstance(value, dict):
        if value.get("multimodal_data"):
            raise at(f"{path}.multimodal_data", "this server's models read text only")
        value = value.get("prompt_string")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise at(path, f"expected a text, token ids, or both mixed, got {kind_of(value)}")
    value = whole_items(value)
    if set(map(type, value)) == {int}:
        return [read_token_ids(value, path)]
    pieces: Pieces = []
    run: list[int] = []
    for index, each in enumerate(value):
        if type(each) is int:
            run.append(each)
        elif isinstance(each, str):
            pieces += [*([read_token_ids(run, path)] if run else []), each]
            run = []
        else:
            raise at(f"{path}[{index}]", f"expected a text or a token id, got {kind_of(each)}")
    pieces += [read_token_ids(run, path)] if run else []
    if len(pieces) > MAX_PIECES:
        raise at(path, f"takes at most {MAX_PIECES} changes between texts and token ids")
    return pieces


def read_biases(value: Any) -> Biases:
    """Pairs of a token id or a text and a bias, as a list or an object; false: never."""
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list) or len(pairs) > MAX_LOGIT_BIAS:
        raise at("", f"expected at most {MAX_LOGIT_BIAS} pairs of a token and a bias")
    found: Biases = []
    for index, pair in enumerate(pairs):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise at(f"[{index}]", f"expected a token and a bias, got {kind_of(pair)}")
        token, bias = whole(pair[0]), pair[1]
        if isinstance(value, dict) and token.isascii() and token.isdigit():
            token = int(token)
        if bias is not False and (isinstance(bias, bool) or not isinstance(bias, int | float)):
            raise at(f"[{index}][1]", f"expected a number or false, got {kind_of(bias)}")
        if isinstance(token, bool) or not isinstance(token, int | str):
            raise at(f"[{index}][0]", f"expected a token id or a text, got {kind_of(token)}")
        found.append((token, NEVER if bias is False else float(bias)))
    return found


@takes_parameters("llamacpp")
class LlamaBody(Body):
    """The fields that completions and infills share, with the sampling parameters."""

    neutral: ClassVar[Table] = OF_LLAMA_CPP

    model: str = Field("", max_length=MAX_NAME, description="a served name; may be left out if only one is served")
    stream: bool = Field(False, description="send the answer as it comes; the last event says stop: true")
    n_predict: int | None = Field(
        None,
        ge=-2,
        description="most tokens of the answer; 0: none, the prompt is cached; -1, -2 or left out: as many as fit",
    )
    max_tokens: int | None = Field(None, ge=-2, description="n_predict by another name")
    n_cmpl: int | None = Field(None, ge=1, le=MAX_SEQUENCES, description=description_of("n"))
    n_probs: int | None = Field(None, ge=0, description="logprobs of so many of the likeliest tokens at each position")
    return_tokens: bool | None = Field(None, description="the answer has its token ids, as tokens")
    seed: int | None = Field(None, description="-1, or 2^32 - 1: at random")
    stop: str | list[str] | None = Field(None, description=parameter("stop").description)
    grammar: str | None = Field(
        None, description="the answer must match this grammar, in llama.cpp's GBNF; not together with json_schema"
    )
    json_schema: Json | None = Field(None, description="the answer must match this JSON schema")
    logit_bias: Annotated[
        Biases | None, PlainValidator(read_biases), WithJsonSchema({"anyOf": [{"type": "array"}, {"type": "object"}]})
    ] = Field(None, description="pairs of a token id or a text and a bias for each of its tokens; false: -100")
    response_fields: Annotated[list[str] | None, BeforeValidator(at_most(MAX_FIELDS))] = Field(
        None, description="of the answer only these; a/b is the field b of a, and stands under that whole name"
    )
    timings_per_token: bool = Field(False, description="each event of a stream has timings")
    user: str | None = Field(None, max_length=MAX_USER, description=description_of("user"))

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer; None: as many as fit."""
        asked = self.n_predict if self.n_predict is not None else self.max_tokens
        return asked if asked is not None and asked >= 0 else None

    def as_completion(self, model: str, prompts: list[str | list[int]], biases: dict[str, float]) -> Json:
        """The body of the same completion. Raises Invalid."""
        if self.grammar and self.json_schema is not None:
            raise Invalid("give grammar or json_schema, not both", param="grammar")
        given = {name: as_llama_reads(name, value) for name, value in given_values(self).items()}
        given |= {ours: getattr(self, name) for name, ours in RENAMED.items()}
        given["max_tokens"] = self.limit or None  # 0 is set later: to a completion it is a mistake
        given["logprobs"] = self.n_probs or None
        given["seed"] = None if self.seed is not None and (self.seed < 0 or self.seed == RANDOM_SEED) else self.seed
        outputs = (
            {"grammar": self.grammar}
            if self.grammar
            else {"json": self.json_schema}
            if self.json_schema is not None
            else None
        )
        own = {"model": model, "prompt": prompts, "logit_bias": biases or None, "structured_outputs": outputs}
        return DEFAULTS | {name: value for name, value in (given | own).items() if value is not None}


class LlamaCompletionBody(LlamaBody):
    prompt: Annotated[list[Pieces], PlainValidator(read_prompts), WithJsonSchema({})] = Field(
        description="a text, token ids, both mixed, or a list of these"
    )


class Extra(Body):
    """Another file of the same project."""

    filename: str = Field("", max_length=4096, description="stands in the prompt before the text")
    text: str = Field(description="what is in it")


class InfillBody(LlamaBody):
    """A gap in a text, for models with tokens for infilling."""

    input_prefix: str = Field(description="the text before the gap")
    input_suffix: str = Field(description="the text after the gap")
    input_extra: list[Extra] = Field(
        default_factory=list, max_length=MAX_EXTRA, description="other files, which come first in the prompt"
    )
    prompt: str = Field("", description="how what fills the gap begins")


class LlamaEmbeddingBody(Body):
    neutral: ClassVar[Table] = {"encoding_format": ("float",)}

    model: str = Field("", max_length=MAX_NAME, description="a served name; may be left out if only one is served")
    content: Inputs = Field(
        None, description="a text, token ids, both mixed, or a list of these: a vector is made of each"
    )
    input: Inputs = Field(None, description="content by another name")
    embd_normalize: Literal[-1, 2] = Field(2, description="2: scale each vector to length 1; -1: leave it as it is")

    @property
    def inputs(self) -> list[Pieces]:
        """Raises Invalid."""
        found = self.content if self.content is not None else self.input
        if found is None:
            raise Invalid("missing required parameter: content", param="content", code="missing_required_parameter")
        return found
