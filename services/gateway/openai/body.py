"""Body: what all bodies have in common. What is not named in one is refused, unless it asks for nothing; and every wrong field is named."""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from services.gateway.openai.fields import shortened
from services.gateway.openai.neutral import without_neutral

MAX_UNKNOWN = 8  # of the unknown fields of an object, so many are named


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}  # fields that are not here, and which values of them ask for nothing

    @model_validator(mode="wrap")
    @classmethod
    def _name_what_is_wrong(cls, value: Any, handler: ModelWrapValidatorHandler["Body"]) -> Any:
        """The unknown fields beside what else is wrong: a body of a million unknown ones is a few errors."""
        if not isinstance(value, dict):
            return handler(value)
        value = without_neutral(value, cls.model_fields, cls.neutral)
        unknown = [key for key in value if key not in cls.model_fields]
        if not unknown:
            return handler(value)
        errors = [_unknown(key) for key in unknown[:MAX_UNKNOWN]]
        try:
            handler({key: each for key, each in value.items() if key in cls.model_fields})
        except ValidationError as error:
            errors += [_again(each) for each in error.errors(include_url=False, include_input=False)]
        raise ValidationError.from_exception_data(cls.__name__, errors)


def _unknown(key: str) -> InitErrorDetails:
    return InitErrorDetails(type=PydanticCustomError("extra_forbidden", "unknown field", {"at": f".{shortened(key)}"}), loc=(), input=None)


def _again(error: Any) -> InitErrorDetails:
    """An error that was raised, to be raised once more."""
    kind = PydanticCustomError(error["type"], "{reason}", {"reason": error["msg"], "at": str(error.get("ctx", {}).get("at", ""))})
    return InitErrorDetails(type=kind, loc=error["loc"], input=None)
