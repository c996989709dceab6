"""The checks of `penstock up` before it starts anything: ports, the device, memory. Without torch,
whose import takes seconds: compute has the last word.

Memory is what the weights take at least, and the KV cache that was asked for; what a step works in comes on top of it.
"""

import ctypes
import errno
import json
import math
import socket
import struct
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from services.requests.store.tenants.api_keys import read_keys
from shared.model.files import ModelFiles
from shared.model.gguf.parts import parts_of
from shared.process.errors import StartupError
from shared.process.host_memory import free_host_memory, size_text
from shared.process.on_cpu import refused_on_cpu
from shared.process.settings import UpSettings

LAST_PORT = 65_535
MAX_HEADER_BYTES = 100_000_000  # what the safetensors library takes
# of a safetensors header; what is stored otherwise is quantized, and is kept as it is
FLOATS = ("F64", "F32", "F16", "BF16")
BYTES_A_WEIGHT = {"w8a8": 1.0, "fp8": 1.0, "w4": 0.5, "nf4": 0.5}
CUDA_SUCCESS = 0


def check_ports(settings: UpSettings) -> None:
    """Raises StartupError for a port that can't be listened on: better now than when everything else has started."""
    if settings.port == 0:
        raise StartupError("--port 0: penstock up has to know where its gateways listen; give a port")
    if settings.port + settings.gateways - 1 > LAST_PORT:
        raise StartupError(
            f"--port {settings.port}: there is no room for {settings.gateways} gateways up to port {LAST_PORT}"
        )
    for number in range(settings.gateways):
        check_port(settings.host, settings.port + number, "--port")
    if settings.redis_port:
        if settings.port <= settings.redis_port < settings.port + settings.gateways:
            raise StartupError(f"--redis-port {settings.redis_port} is a gateway's, too")
        check_port("127.0.0.1", settings.redis_port, "--redis-port")


def check_port(host: str, port: int, flag: str) -> None:
    """Raises StartupError for one that something listens on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            wrong = flag if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
            raise StartupError(
                f"can't listen on {host}:{port}: {error.strerror or error}. Another one with {wrong}"
            ) from None


def check_keys(settings: UpSettings) -> None:
    """Raises StartupError for a file of keys that no gateway would take."""
    if settings.auth:
        with suppress(FileNotFoundError):
            read_keys(settings.keys_file)


def check_device(settings: UpSettings) -> None:
    """Raises StartupError where --device cuda asks for a GPU that is not there, or that the torch
    which is installed can't use; and for what a CPU can't do, where there is nothing else."""
    is_on_cpu = settings.device == "cpu" or (settings.device == "auto" and not gpu_memory())
    if is_on_cpu and (refusal := refused_on_cpu(settings)):
        raise StartupError(refusal)
    if settings.device != "cuda":
        return
    if not gpu_memory():
        raise StartupError("--device cuda: there is no CUDA device here, or no driver for it")
    if version("torch").endswith("+cpu"):
        raise StartupError("--device cuda: the torch that is installed is its CPU build")


def check_memory(settings: UpSettings, models: list[ModelFiles]) -> None:
    """Raises StartupError if the models can't fit into what is free, or, with a GPU, into that."""
    room, where = free_host_memory(), "are free on this machine"
    gpus = gpu_memory() if settings.device != "cpu" else []
    if gpus and (settings.device == "cuda" or gpus[0] > room):
        room, where = gpus[0], "are the GPU's"
    weights = sum(weights_bytes(files, settings) for files in models)
    kv_cache = int(settings.kv_cache_memory or 0) * len(models)
    if weights + kv_cache <= room:
        return
    names = ", ".join(files.name for files in models)
    cache = f" and {size_text(kv_cache)} for the KV cache (--kv-cache-memory)" if kv_cache else ""
    hint = (
        "less of the latter"
        if weights <= room
        else "a smaller model"
        if settings.quantization != "none"
        else "--quantization w8a8 or w4, or a smaller model"
    )
    raise StartupError(
        f"{names}: at least {size_text(weights)} for the weights{cache}, and {size_text(room)} {where}: {hint}"
    )


def weights_bytes(files: ModelFiles, settings: UpSettings) -> int:
    """Bytes that the weights take in memory, at least; 0 where the files can't be read, which
    compute will say better.
    """
    try:
        if files.weights.is_file():
            return sum(part.stat().st_size for part in parts_of(files.weights))
        return sum(tensors_bytes(file, settings) for file in weight_files(files.weights))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError):
        return 0


def weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    return sorted(folder.glob("*.safetensors"))


def tensors_bytes(file: Path, settings: UpSettings) -> int:
    """Bytes that a safetensors file's tensors take in memory."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        if length > MAX_HEADER_BYTES:
            raise ValueError
        header = json.loads(opened.read(length))
    float_bytes = BYTES_A_WEIGHT.get(settings.quantization, 4.0 if settings.dtype == "float32" else 2.0)
    tensors = [each for name, each in header.items() if name != "__metadata__"]
    sizes = (
        math.prod(each["shape"]) * float_bytes
        if each["dtype"] in FLOATS
        else each["data_offsets"][1] - each["data_offsets"][0]
        for each in tensors
    )
    return int(sum(sizes))


def gpu_memory() -> list[int]:
    """Bytes of each CUDA device, as the driver tells them; none where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int(0)
    if driver.cuInit(0) != CUDA_SUCCESS or driver.cuDeviceGetCount(ctypes.byref(count)) != CUDA_SUCCESS:
        return []
    sizes = []
    for number in range(count.value):
        device, size = ctypes.c_int(0), ctypes.c_size_t(0)
        if (
            driver.cuDeviceGet(ctypes.byref(device), number) == CUDA_SUCCESS
            and driver.cuDeviceTotalMem_v2(ctypes.byref(size), device) == CUDA_SUCCESS
        ):
            sizes.append(size.value)
    return sizes
