"""The bodies of vLLM's, Cohere's and Jina's endpoints that make vectors and scores of texts."""

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from services.requests.bodies.body import ANYTHING, Body, Table
from services.requests.bodies.fields import MAX_NAME, Texts, read_text
from services.requests.dialects.openai.embeddings import EmbeddingBody, EncodedBody
from services.requests.dialects.openai.schemas import MAX_PRIORITY, MAX_USER, description_of
from shared.model.sampling_params import MAX_TOKENS
from shared.process.errors import Invalid


class PoolingBody(EmbeddingBody):
    """One vector of each input, as for embeddings."""

    task: str | None = Field(
        None,
        pattern="^embed$",
        description="the only one of vLLM's tasks that is here: its others make a vector of each token",
    )


class PairEmbeddings(EmbeddingBody):
    """A request for what a classifier makes of each pair of texts. It comes from no client."""

    firsts: list[str] = []  # as many as inputs

    def prompts(self, *, may_bring_template: bool) -> list[dict[str, Any]]:  # noqa: ARG002
        return [{"prompt": first, "pair": second} for first, second in zip(self.firsts, self.input or [], strict=True)]


class PairsBody(EncodedBody):
    """The fields that bodies of scores share."""

    neutral: ClassVar[Table] = {"service_tier": ("auto", "default"), "metadata": ANYTHING}

    def vectors_of(self, texts: list[str]) -> EmbeddingBody:
        """Make the request for a vector of each of these texts."""
        return EmbeddingBody.model_construct(input=[*texts], **self._others())

    def logits_of(self, firsts: list[str], seconds: list[str]) -> EmbeddingBody:
        """Make the request for a classifier's numbers of each pair."""
        return PairEmbeddings.model_construct(firsts=firsts, input=[*seconds], normalize=False, **self._others())

    def _others(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in EncodedBody.model_fields}


class ScoreBody(PairsBody):
    """One text with each of several, or as many pairs as there are texts on either side."""

    text_1: Texts | None = Field(None, description="one text, or as many as text_2")
    text_2: Texts | None = Field(
        None, description="one text or several, each scored with its own of text_1, or with the only one"
    )
    queries: Texts | None = Field(None, description="text_1 by its newer name")
    documents: Texts | None = Field(None, description="text_2 by its newer name")

    def pairs(self) -> tuple[list[str], list[str]]:
        """Both sides; the first has one text, or as many as the second. Raises Invalid."""
        firsts, seconds = self.text_1 or self.queries, self.text_2 or self.documents
        if firsts is None or seconds is None:
            raise Invalid(
                "give text_1 and text_2 (or queries and documents)", param="text_1" if firsts is None else "text_2"
            )
        if len(firsts) not in (1, len(seconds)):
            raise Invalid(
                f"text_1 has {len(firsts)} texts and text_2 {len(seconds)}: give one text_1, or as many of both",
                param="text_1",
            )
        return firsts, seconds


class RerankBody(PairsBody):
    """A query, and the documents to be sorted by how well they answer it."""

    query: Annotated[str, BeforeValidator(read_text)] = Field(description="the text that each document is scored with")
    documents: Texts = Field(description="the texts to sort")
    top_n: int | None = Field(None, ge=0, description="only the best so many; 0 or left out: all")
    return_documents: bool = Field(True, description="false: the results have index and score alone")
    return_text: bool | None = Field(None, description="return_documents by another name")


class TextsBody(PairsBody):
    """The same, as text-embeddings-inference (TEI) takes it."""

    neutral: ClassVar[Table] = PairsBody.neutral | {"raw_scores": (False,), "truncation_direction": ("right", "Right")}

    query: Annotated[str, BeforeValidator(read_text)] = Field(description="the text that each of texts is scored with")
    texts: Texts = Field(description="the texts to sort")
    top_n: int | None = Field(None, ge=0, description="only the best so many; 0 or left out: all")
    return_text: bool = Field(False, description="true: the results have the texts")
    truncate: bool = Field(False, description="true: cut what is too long; truncate_prompt_tokens by another name")


class ClassificationBody(Body):
    """Texts for a model with a classification head."""

    neutral: ClassVar[Table] = PairsBody.neutral

    model: str = Field("", max_length=MAX_NAME, description="a served name; may be left out if only one is served")
    input: Texts = Field(description="one text or several; each gets a label")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=MAX_TOKENS, description="keep a text's first so many tokens; -1: as many as fit"
    )
    use_activation: bool = Field(True, description="false: the head's own numbers instead of probabilities")
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description=description_of("priority"))
    user: str | None = Field(None, max_length=MAX_USER, description=description_of("user"))

    def embedding(self) -> EmbeddingBody:
        """Make the request for the head's own numbers."""
        names = ("model", "input", "truncate_prompt_tokens", "priority", "user")
        return EmbeddingBody.model_construct(normalize=False, **{name: getattr(self, name) for name in names})
