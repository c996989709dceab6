"""The settings that every stage has."""

from collections.abc import Collection
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

ToolCallParser = Literal[
    "auto",
    "none",
    "hermes",
    "llama3_json",
    "mistral",
    "granite",
    "qwen3_coder",
    "glm45",
    "minimax_m2",
    "kimi_k2",
    "deepseek_v32",
    "deepseek_v31",
    "deepseek_v3",
    "lfm2",
    "olmo3",
    "pythonic",
    "gemma",
    "harmony",
]
ReasoningParser = Literal["auto", "none", "deepseek_r1", "qwen3", "granite", "mistral", "gemma4", "harmony"]
DEFAULT_DATA_DIR = Path.home() / ".penstock"
DEFAULT_REDIS_URL = f"unix://{DEFAULT_DATA_DIR}/redis.sock"


class StageSettings(BaseSettings):
    """Settings of every stage."""

    command: ClassVar[str] = "penstock"  # that takes these settings as flags
    examples: ClassVar[str] = ""  # lines of it, for --help
    model_config = SettingsConfigDict(
        env_prefix="PENSTOCK_", extra="ignore", frozen=True, cli_kebab_case=True, cli_implicit_flags=True
    )

    redis_url: str = Field(
        DEFAULT_REDIS_URL,
        description=(
            "Redis or Valkey, from 6.2: redis://host:port/0, unix:///path, redis+sentinel://host:port,host:port/name/0"
        ),
    )
    redis_timeout_s: float = Field(60.0, gt=0, description="how long to wait for Redis at the start")
    replica_id: str = Field(
        "", description="this replica's name in the registry; by default a random one", pattern=r"^[A-Za-z0-9._-]*$"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe event to log")
    log_format: Literal["text", "json"] = Field(
        "text", description="form of the log, on standard error; json: an object a line"
    )


def environment_of(settings: StageSettings, exclude: Collection[str] = ()) -> dict[str, str]:
    """The settings as variables of the environment, from which another process reads the same."""
    values = settings.model_dump(exclude=set(exclude))
    return {
        f"PENSTOCK_{key.upper()}": ",".join(value) if isinstance(value, list) else str(value)
        for key, value in values.items()
        if value is not None
    }
