"""The settings of a replica that is several processes: a group of ranks."""

from pydantic import Field, model_validator

from shared.process.stage_settings import StageSettings

MAX_PORT = 65535


class GroupSettings(StageSettings):
    """One replica of several processes, its ranks."""

    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="ranks that divide every layer; each has its part of the weights and of the KV cache",
    )
    pipeline_parallel_size: int = Field(
        1, ge=1, le=64, description="stages that divide the layers, each of --tensor-parallel-size ranks"
    )
    shard_weights: bool = Field(
        False,
        description=(
            "the ranks of --tensor-parallel-size keep the weights; rank 0 computes, and gets each layer's in each step"
        ),
    )
    group_timeout_s: float = Field(
        5.0,
        ge=1,
        le=600,
        description="a rank that has been silent for this long ends its group, which then starts again",
    )
    group_wait_s: float = Field(
        300.0, gt=0, description="how long the ranks of a group wait for each other at the start"
    )

    @property
    def num_ranks(self) -> int:
        """Ranks of the group; 1: there is no group."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @model_validator(mode="after")
    def check_shards(self) -> "GroupSettings":
        if self.shard_weights and self.tensor_parallel_size == 1:
            raise ValueError(
                "--shard-weights needs --tensor-parallel-size of 2 or more: the ranks that keep the weights"
            )
        if self.shard_weights and self.pipeline_parallel_size > 1:
            raise ValueError(
                "--shard-weights: rank 0 computes alone, so there are no --pipeline-parallel-size "
                f"{self.pipeline_parallel_size} stages"
            )
        return self


class RankSettings(GroupSettings):
    """The ranks of a group, where each is started by hand; else rank 0 starts the others, on its own
    host."""

    rank: int | None = Field(None, ge=0, description="this process's place in its group; only rank 0 speaks to Redis")
    world_size: int | None = Field(
        None,
        ge=1,
        description="ranks of the group: --tensor-parallel-size times --pipeline-parallel-size, which is the default",
    )
    master: str = Field(
        "",
        description=(
            "HOST:PORT, as in 10.0.0.7:29400: where rank 0 listens, and the others connect. Only hosts of the group "
            "may reach it"
        ),
    )

    @model_validator(mode="after")
    def check_rank(self) -> "RankSettings":
        if self.world_size is not None and self.world_size != self.num_ranks:
            sizes = (
                f"--tensor-parallel-size {self.tensor_parallel_size} times --pipeline-parallel-size "
                f"{self.pipeline_parallel_size}"
            )
            raise ValueError(f"--world-size {self.world_size} is not {sizes}, which is {self.num_ranks}")
        if not self.master:
            given = next(
                (
                    f"--{name.replace('_', '-')} {value}"
                    for name in ("rank", "world_size")
                    if (value := getattr(self, name)) is not None
                ),
                None,
            )
            if given is not None:
                raise ValueError(
                    f"{given} needs --master HOST:PORT, where rank 0 listens; without these three, rank 0 starts the "
                    "others on this host"
                )
            return self
        split_address(self.master)
        if self.num_ranks == 1:
            raise ValueError(
                "--master is for groups: --tensor-parallel-size or --pipeline-parallel-size says of how many ranks"
            )
        if self.rank is None:
            raise ValueError(f"--master needs --rank: this process's place, from 0 to {self.num_ranks - 1}")
        if self.rank >= self.num_ranks:
            raise ValueError(
                f"--rank {self.rank}: the {self.num_ranks} ranks of the group are 0 to {self.num_ranks - 1}"
            )
        return self


def split_address(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, or of `[HOST]:PORT` with an IPv6 address. Raises ValueError."""
    host, _, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else "" if ":" in host else host
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) <= MAX_PORT:
        raise ValueError(f"--master takes HOST:PORT, as in 10.0.0.7:29400, not {text[:80]!r}")
    return host, int(port)
