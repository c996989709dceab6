"""Settings: one flat class a stage, from flags or PENSTOCK_* in the environment. `--help` is made
from the descriptions."""

import ipaddress
import re
import sys
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    ByteSize,
    Field,
    SecretStr,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import CliSettingsSource, NoDecode, SettingsError

from shared.process.arguments import CommandLineParser, add_setting
from shared.process.errors import StartupError
from shared.process.group_settings import GroupSettings, RankSettings
from shared.process.stage_settings import DEFAULT_DATA_DIR, ReasoningParser, StageSettings, ToolCallParser

SPECULATORS = ("auto", "off", "lookup", "grammar", "prediction", "medusa", "eagle", "self", "draft")
BETWEEN_CELLS = re.compile(r"\s+|,(?=[a-z0-9-]+=[a-z+]+://)")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
DEFAULT_KEYS_FILE = DEFAULT_DATA_DIR / "api-keys.json"


def split_list(value: Any) -> Any:
    return [part for part in value.split(",") if part] if isinstance(value, str) else value


def split_cells(value: Any) -> Any:
    """Flags come joined by commas, and URLs hold commas, too."""
    return [each for each in BETWEEN_CELLS.split(value) if each] if isinstance(value, str) else value


def split_place(value: str) -> tuple[Path, int]:
    """A folder, and how many bytes it may take, of `FOLDER,SIZE`. Raises ValueError."""
    folder, _, size = value.rpartition(",")
    try:
        num_bytes = int(TypeAdapter(ByteSize).validate_python(size))
    except ValidationError:
        num_bytes = 0
    if not folder.strip() or num_bytes <= 0:
        raise ValueError(f"it takes FOLDER,SIZE, as in /var/cache/kv,20GiB, not {value[:80]!r}")
    try:
        return Path(folder).expanduser(), num_bytes
    except RuntimeError as error:  # of ~somebody
        raise ValueError(f"{value[:80]!r}: {error}") from None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class ModelSettings(StageSettings):
    """Settings of the stages that read the model's files."""

    model: str = Field(
        "demo",
        description="a checkpoint folder, a GGUF file, a name that was pulled, a hub id when online, or demo",
    )
    served_model_name: str = Field(
        "", description="the name clients use, or several joined by commas; the folder's name by default"
    )


class RequestSettings(StageSettings):
    """Settings of gateways and batch workers, which make requests of bodies. Give all of them the
    same."""

    cell: Annotated[list[str], NoDecode, BeforeValidator(split_cells)] = Field(
        [],
        description="further cells as NAME=REDIS_URL, joined by spaces: pipelines in a Redis or slot of their own",
    )
    max_requests: int = Field(
        1024, gt=0, description="requests in the pipeline of a model, over all gateways; beyond: 429"
    )
    max_tokens_in_flight: int = Field(
        4_000_000, gt=0, description="prompt and output tokens of those requests, estimated; beyond: 429"
    )
    max_held_size: ByteSize = Field(
        ByteSize(256 << 20), gt=0, description="bytes in Redis of one key's requests and stored responses; beyond: 429"
    )
    max_body_bytes: int = Field(32 << 20, gt=0, description="longest request body; of a batch, longest line")
    image_host: Annotated[list[str], NoDecode] = Field(
        [],
        description=(
            "a host that images may be fetched from by http(s) URL; by default only images in the request and files; "
            "may be given several times"
        ),
    )
    min_priority: int = Field(
        0, ge=-100, le=100, description="the most urgent (smallest) priority that clients may ask for; beyond: 400"
    )
    strict_fields: bool = Field(
        False,
        description=(
            "refuse fields of requests that are unknown or not supported; else the header X-Penstock-Ignored names them"
        ),
    )
    trust_request_chat_template: bool = Field(
        False, description="clients may bring a chat template of their own, which runs in a sandbox"
    )
    wait_for_replicas_s: float = Field(
        0.0,
        ge=0,
        le=86400,
        description=(
            "how long a request for a model that was served before waits for replicas to be started, if it has none; "
            "then: 503. 0: at once"
        ),
    )
    files_url: str = Field(
        str(DEFAULT_DATA_DIR / "files"),
        description=(
            "where files are kept: a folder that gateways and workers share, or a URL that fsspec supports, such as "
            "s3://bucket/penstock"
        ),
    )

    @field_validator("image_host", mode="before")
    @classmethod
    def split_hosts(cls, value: Any) -> Any:
        """Split a value from the environment, joined by commas."""
        return split_list(value)


class GatewaySettings(RequestSettings):
    """The front door: OpenAI's API over HTTP."""

    command: ClassVar[str] = "penstock serve gateway"
    examples: ClassVar[str] = "penstock serve gateway --redis-url redis://10.0.0.5:6379/0 --host 0.0.0.0 --port 8000"

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for every interface")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on")
    tls_certificate: Path | None = Field(
        None, description="a PEM file of the certificate and those above it: the gateway then speaks HTTPS"
    )
    tls_key: Path | None = Field(
        None, description="a PEM file of its private key; by default it is in the certificate's file"
    )
    auth: bool = Field(
        True, description="--no-auth: everybody who reaches the gateway may use it, with a key or without"
    )
    keys_file: Path = Field(
        DEFAULT_KEYS_FILE, description="file of API keys, as penstock keys writes it; if it exists, requests need a key"
    )
    api_key: SecretStr = Field(
        SecretStr(""),
        description="one more API key, an administrator's. Other users can see a flag: set PENSTOCK_API_KEY instead",
    )
    max_file_bytes: ByteSize = Field(ByteSize(200 << 20), gt=0, description="longest file that may be uploaded")
    max_files_size: ByteSize = Field(ByteSize(10 << 30), gt=0, description="all files of one owner; beyond: 413")
    max_body_memory: ByteSize = Field(
        ByteSize(256 << 20), gt=0, description="memory of bodies that are being received; beyond: 503"
    )
    max_connections: int = Field(4096, gt=0, description="open connections; beyond: 503")
    header_timeout_s: float = Field(
        10.0, gt=0, description="how long a request's headers may take; then the connection is closed"
    )
    keep_alive_timeout_s: int = Field(
        130, gt=0, description="an idle connection is closed after this; choose more than the proxy's time"
    )
    body_timeout_s: float = Field(60.0, gt=0, description="how long a request's body may take; then: 408")
    write_timeout_s: float = Field(
        60.0, gt=0, description="a client that has not read for this long loses its connection"
    )
    ping_interval_s: float = Field(
        5.0,
        gt=0,
        description="time between the pings that keep a waiting stream open, and between checks of silent logs",
    )
    stuck_after_s: float = Field(60.0, gt=0, description="a compute step that takes longer makes /health say 503")
    allow_origin: Annotated[list[str], NoDecode] = Field(
        [],
        description=(
            "a further origin of pages that may call the API: https://chat.example; *: all; null: files, sandboxed "
            "pages; may be given several times"
        ),
    )
    chaos_demo: bool = Field(
        False,
        description=(
            "the playground may kill this machine's replicas, to show that nothing is lost; on a loopback address only"
        ),
    )

    @model_validator(mode="after")
    def check_chaos(self) -> "GatewaySettings":
        if self.chaos_demo and not is_loopback(self.host):
            where = self.host or "every interface"
            raise ValueError(
                "--chaos-demo lets every client of this gateway kill processes: it takes a loopback --host, not "
                f"{where}"
            )
        return self

    @field_validator("allow_origin", mode="before")
    @classmethod
    def split_origins(cls, value: Any) -> Any:
        """Split a value from the environment, joined by commas."""
        return split_list(value)

    @field_validator("allow_origin")
    @classmethod
    def check_origins(cls, value: list[str]) -> list[str]:
        for origin in value:
            if origin not in ("*", "null") and ORIGIN.fullmatch(origin) is None:
                raise ValueError(f"an origin is scheme://host or scheme://host:port, without a path, not {origin!r}")
        return value


class FormatSettings(StageSettings):
    """How the model writes tool calls and reasoning."""

    tool_call_parser: ToolCallParser = Field(
        "auto", description="the form of the model's tool calls; auto: what its chat template says"
    )
    reasoning_parser: ReasoningParser = Field(
        "auto", description="the marks of the model's reasoning; auto: what its chat template says"
    )


class TokenizerSettings(ModelSettings, FormatSettings):
    """Turns text into token ids."""

    command: ClassVar[str] = "penstock serve tokenizer"
    examples: ClassVar[str] = (
        "penstock serve tokenizer --redis-url redis://10.0.0.5:6379/0 --model ~/models/Qwen2.5-0.5B-Instruct"
    )

    max_batch: int = Field(64, gt=0, description="requests encoded together")
    prefix_affinity: bool = Field(
        True,
        description="prompts go to the compute replica that has their prefix, unless it has more to do than others",
    )


class SamplerSettings(ModelSettings):
    """Turns candidates into tokens and text."""

    command: ClassVar[str] = "penstock serve sampler"
    examples: ClassVar[str] = (
        "penstock serve sampler --redis-url redis://10.0.0.5:6379/0 --model ~/models/Qwen2.5-0.5B-Instruct"
    )

    drain_s: float = Field(2.5, ge=0, description="after SIGTERM, how long it must get no candidates before it exits")


class EngineSettings(GroupSettings):
    """How the model runs."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="type of weights and KV cache; auto: the checkpoint's, or bfloat16"
    )
    model_impl: Literal["auto", "native", "transformers"] = Field(
        "auto",
        description=(
            "whose layers run: our own, or the transformers library's; auto: our own where they know the architecture"
        ),
    )
    quantization: Literal["none", "w8a8", "w4", "nf4", "fp8"] = Field(
        "none",
        description=(
            "form of the weights, made at load; activations are then int8, or FP8 with fp8, which needs a GPU: "
            "docs/understand/kernels.md"
        ),
    )
    quantization_group: Literal["32", "64", "128"] = Field(
        "32", description="inputs that share a step (w4) or a scale (nf4)"
    )
    quantize_attention_output: bool = Field(
        False,
        description="with four bits, attention's output projection in four bits too; else it has eight, like w8a8",
    )
    activations: Literal["int8", "bfloat16"] = Field(
        "int8",
        description="what meets quantized weights on a CPU; bfloat16: the bits of the weights widened, but slower",
    )
    quantize_lm_head: bool = Field(
        False, description="with four bits, the LM head in four bits too; else it has eight, like w8a8"
    )
    max_model_len: int | None = Field(
        None, gt=0, description="longest sequence, prompt and output; the model's own by default"
    )
    max_num_seqs: int | None = Field(
        None, gt=0, description="sequences in one step; by default 256 on a GPU, 64 on a CPU"
    )
    max_batched_tokens: int | None = Field(
        None, gt=0, description="tokens in one step: chunks of prompts, too; by default 2048 on a GPU, 512 on a CPU"
    )
    target_itl_ms: float | None = Field(
        None,
        gt=0,
        description="target of the time between tokens: chunks of prompts are cut to meet it, where that is possible",
    )
    admission: Literal["predicted", "paged", "reserve"] = Field(
        "predicted", description="how much must fit before a sequence begins: docs/understand/scheduling.md"
    )
    admission_confidence: float = Field(
        0.99, ge=0.5, lt=1, description="confidence with which a predicted peak of the KV cache must fit"
    )
    aging_s: float = Field(
        30.0, ge=0, description="seconds of waiting that are worth one level of priority; 0: priorities do not count"
    )
    block_size: int = Field(
        16,
        gt=0,
        le=1024,
        description="tokens in a KV cache block: a multiple of 16, or any number where attention runs in torch",
    )
    prefix_caching: bool = Field(
        True, description="keep the KV of finished sequences for sequences with the same beginning"
    )
    kv_cache_dtype: Literal["auto", "int8"] = Field(
        "auto", description="type of keys and values; int8: in groups, nearly twice the tokens"
    )
    kv_cache_group: Literal["8", "32", "64"] | None = Field(
        None, description="dimensions that share a scale with int8; by default 64 where heads allow"
    )
    kv_cache_memory: ByteSize | None = Field(
        None, gt=0, description="size of the KV cache, as in 4GiB; else --kv-cache-share decides"
    )
    kv_cache_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of the memory that is free beside the weights; by default 0.9 of a GPU's, 0.25 of a CPU's",
    )
    image_cache: ByteSize = Field(
        ByteSize(1 << 30), gt=0, description="memory for embeddings of images, of models that see"
    )
    kv_disk: str | None = Field(
        None,
        description=(
            "FOLDER,SIZE, as in ~/.penstock/kv,20GiB: keep the prefix cache's blocks in a file, too; replicas of a "
            "host share it"
        ),
    )
    allow_batch_variance: bool = Field(
        False,
        description=(
            "on a GPU, use the vendor's matrix products where they may be faster: a token's bits then depend on the "
            "batch; docs/understand/gpu.md"
        ),
    )
    reader_timeout_s: float = Field(
        60.0, gt=0, description="a request whose gateway has been gone for this long is cancelled, unless resumed"
    )
    step_timeout_s: float | None = Field(
        None,
        gt=0,
        description=(
            "a step that takes longer has hung: compute ends, and another replica goes on; by default 300 on a GPU, "
            "3600 on a CPU"
        ),
    )
    num_threads: int = Field(
        0, ge=0, description="threads of the model, of each rank; 0: all cores, divided over the ranks of a host"
    )
    run_ahead: int = Field(
        8,
        ge=0,
        le=16,
        description="steps of a sequence that may be computed on before the log holds their tokens; 0: wait for each",
    )
    speculate: str = Field(
        "auto",
        description="who guesses tokens that a step computes at once, joined by commas: lookup (what followed before), "
        "grammar (what a schema forces), prediction (what the client expects), medusa or eagle (--heads), "
        "self (the model itself in four bits), draft (--draft-model); auto: lookup, grammar, prediction and heads, "
        "where they pay; off: nobody. No text depends on it: docs/understand/speculation.md",
    )
    heads: str = Field(
        "",
        description=(
            "a folder of heads, which guess the model's next tokens: Medusa's (penstock train-heads makes them), or "
            "EAGLE-3's; auto uses them, too"
        ),
    )
    self_draft: str = Field(
        "",
        description=(
            "for --speculate self, the same model as penstock quantize wrote it, calibrated: it guesses better than "
            "weights rounded at load"
        ),
    )
    draft_model: str = Field(
        "", description="for --speculate draft, a smaller model with the same tokenizer, which guesses tokens"
    )
    num_speculative_tokens: int = Field(
        16, ge=1, le=63, description="tokens that may be guessed at once for a sequence"
    )
    publish_interval_ms: float | None = Field(
        None,
        ge=0,
        le=1000,
        description=(
            "the tokens of steps shorter than this go out together, first and last ones at once; by default 50 where "
            "the model has all cores"
        ),
    )

    @field_validator("kv_disk")
    @classmethod
    def check_kv_disk(cls, value: str | None) -> str | None:
        if value is not None:
            split_place(value)
        return value

    @field_validator("speculate")
    @classmethod
    def check_speculators(cls, value: str) -> str:
        names = value.split(",")
        unknown = next((name for name in names if name not in SPECULATORS), None)
        if unknown is not None or (len(names) > 1 and "off" in names):
            raise ValueError(
                f"it takes some of {', '.join(speculator for speculator in SPECULATORS if speculator != 'off')}, or off"
            )
        return value

    @model_validator(mode="after")
    def check_weights_of_proposers(self) -> "EngineSettings":
        names = self.speculate.split(",")
        if ("draft" in names) != bool(self.draft_model):
            raise ValueError("--speculate draft and --draft-model PATH need each other")
        if self.self_draft and "self" not in names:
            raise ValueError("--self-draft is for --speculate self")
        if (head := next((name for name in names if name in ("medusa", "eagle")), None)) and not self.heads:
            raise ValueError(f"--speculate {head} needs --heads FOLDER")
        if self.heads and not {"medusa", "eagle", "auto", "off"} & set(names):
            raise ValueError(
                f"--speculate {self.speculate} does not use --heads: add medusa or eagle, whichever they are"
            )
        if self.model_impl == "transformers" and self.num_ranks > 1:
            raise ValueError(
                "--model-impl transformers: that library runs a model whole; ranks divide models that run on our own "
                "executor"
            )
        return self


class ComputeSettings(ModelSettings, EngineSettings, RankSettings):
    """Runs the model."""

    command: ClassVar[str] = "penstock serve compute"
    examples: ClassVar[str] = (
        "penstock serve compute --redis-url redis://10.0.0.5:6379/0 --model ~/models/Qwen2.5-0.5B-Instruct "
        "--quantization w8a8 --kv-cache-memory 4GiB"
        "\n  penstock serve compute --model ~/models/mine --tensor-parallel-size 2     two ranks on this host"
        "\n  penstock serve compute --model ~/models/mine --tensor-parallel-size 2 --rank 1 "
        "--master 10.0.0.7:29400     one of two hosts"
    )


class EncoderSettings(ModelSettings):
    """Makes embeddings of images, for compute, of models that see."""

    command: ClassVar[str] = "penstock serve encoder"
    examples: ClassVar[str] = (
        "penstock serve encoder --redis-url redis://10.0.0.5:6379/0 --model ~/models/SmolVLM-256M-Instruct"
    )

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where it runs")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="type of the weights; auto: the checkpoint's. The same as compute's"
    )
    num_threads: int = Field(0, ge=0, description="threads; 0: all cores")


class WorkerSettings(StageSettings):
    """How batches run."""

    batch_requests: int = Field(
        32, gt=0, description="sequences of batches that one worker has in the pipeline at once"
    )
    busy_batch_requests: int = Field(8, gt=0, description="the same, while other requests are in the pipeline")


class JobsSettings(RequestSettings, WorkerSettings):
    """Runs batches."""

    command: ClassVar[str] = "penstock serve jobs"
    examples: ClassVar[str] = "penstock serve jobs --redis-url redis://10.0.0.5:6379/0 --files-url s3://bucket/penstock"


class UpSettings(GatewaySettings, EngineSettings, FormatSettings, WorkerSettings):
    """Start everything on this machine: every stage, restarted when it dies, and a Redis unless
    --redis-url names one."""

    command: ClassVar[str] = "penstock up"
    examples: ClassVar[
        str
    ] = """penstock up                                    a small model, fetched once, on http://127.0.0.1:8000
  penstock up --model ~/models/Qwen2.5-0.5B-Instruct --samplers 2 --port 9000
  penstock up --model owner/name --quantization w8a8 --kv-cache-memory 4GiB
  penstock up --model ~/models/A --model ~/models/B     both behind one address
  penstock up --model ~/models/mine --tensor-parallel-size 2     one model, divided over two processes"""

    model: Annotated[list[str], NoDecode] = Field(
        [],
        description="a checkpoint folder, a GGUF file, a name that was pulled, a hub id when online, or demo; "
        "may be given several times. "
        "By default SmolLM2-135M-Instruct, which is fetched once, or the demo where it can't be had",
    )
    served_model_name: Annotated[list[str], NoDecode] = Field(
        [],
        description=(
            "the name clients use, by default the folder's; may be given several times: further names of one model, "
            "or one for each of several"
        ),
    )
    gateways: int = Field(1, gt=0, description="gateway replicas, on ports from --port upwards")
    tokenizers: int = Field(1, gt=0, description="tokenizer replicas")
    samplers: int = Field(1, gt=0, description="sampler replicas")
    jobs: int = Field(1, ge=0, description="workers for batches; 0: batches wait until there is one")
    files_url: str = Field(
        "",
        description=(
            "where files are kept: a folder, or a URL that fsspec supports, such as s3://bucket/penstock; by default "
            "the data folder's files"
        ),
    )
    data_dir: Path = Field(DEFAULT_DATA_DIR, description="where the embedded Redis keeps its data and socket")
    redis_port: int = Field(
        0, ge=0, le=65535, description="loopback TCP port of the embedded Redis; 0: Unix socket only"
    )
    redis_memory: ByteSize | None = Field(
        None,
        ge=32 << 20,
        description=(
            "memory of the embedded Redis, as in 2GiB: near it, new requests get 503; by default a quarter of the "
            "machine's memory"
        ),
    )

    @field_validator("model", "served_model_name", mode="before")
    @classmethod
    def split(cls, value: Any) -> Any:
        """Split names from the environment, joined by commas."""
        return split_list(value)

    @model_validator(mode="after")
    def check_names(self) -> "UpSettings":
        if len(self.model) > 1 and len(self.served_model_name) not in (0, len(self.model)):
            raise ValueError(f"{len(self.model)} models need as many --served-model-name, or none")
        return self

    def names_of(self, number: int) -> str:
        """The names of the number-th model as a stage takes them; empty: its own."""
        if len(self.model) == 1:
            return ",".join(self.served_model_name)
        return self.served_model_name[number] if self.served_model_name else ""


S = TypeVar("S", bound=StageSettings)


def load_settings(settings_type: type[S], argv: list[str] | None = None, **fixed: Any) -> S:
    """Settings from flags (argv, by default the command line's) over the environment. Raises
    StartupError in one line."""
    arguments = sys.argv[1:] if argv is None else argv
    name = settings_type.command
    parser = CommandLineParser(
        prog=name,
        usage=f"{name} [--FLAG VALUE ...]",
        description=f"{settings_type.__doc__} Every flag can also be set as PENSTOCK_<FLAG> in the environment.",
        epilog=f"examples:\n  {settings_type.examples}",
    )
    flags: CliSettingsSource[Any] = CliSettingsSource(
        settings_type, root_parser=parser, add_argument_method=add_setting
    )
    try:
        return settings_type(_cli_settings_source=flags(args=arguments), **fixed)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if not name:
            raise StartupError(first["msg"].removeprefix("Value error, ")) from None
        raise StartupError(
            f"--{name.replace('_', '-')}: {first['msg'].removeprefix('Value error, ')}, got {first['input']!r}"
        ) from None
    except SettingsError as error:
        raise StartupError(str(error)) from None
