"""The body of Mistral's endpoint for infilling."""

from typing import Annotated, Any

from pydantic import Field, PlainValidator, model_validator

from services.requests.bodies.fields import Prompt, at, kind_of
from services.requests.dialects.openai.schemas import CompletionBody, description_of
from shared.model.sampling_params import SamplingParams


def read_text(value: Any) -> list[Prompt]:
    if not isinstance(value, str):
        raise at("", f"expected a text, got {kind_of(value)}")
    return [value]


class FimBody(CompletionBody):
    """A gap between a prompt and a suffix."""

    prompt: Annotated[list[Prompt], PlainValidator(read_text, json_schema_input_type=str)] = Field(
        description="the text before the gap"
    )
    suffix: str | None = Field(None, description="the text behind it")
    random_seed: int | None = Field(
        None, ge=0, lt=1 << 63, description=f"Mistral's name of seed: {description_of('seed')}"
    )

    @model_validator(mode="after")
    def _seeded(self) -> "FimBody":
        if self.random_seed is not None and self.seed not in (None, self.random_seed):
            raise at(".random_seed", "it differs from seed: give one")
        self.seed = self.seed if self.random_seed is None else self.random_seed
        return self

    def params(self) -> SamplingParams:
        """As many tokens as fit, where a completion has 16."""
        params = super().params()
        return (
            params
            if self.max_tokens is not None
            else self.sampling_params(max_tokens=None, logprobs=self.logprobs, prompt_logprobs=self.prompt_logprobs)
        )
