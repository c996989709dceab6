"""PixelReader: reads images' files from Redis and decodes them to pixels, while steps run."""

import queue
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from shared.model.vision.images import Image
from shared.model.vision.shape import VisionFamily
from shared.process.errors import Invalid
from shared.process.helper import HelperProcess, HelperStuck
from shared.process.plain import Unreadable, pack
from shared.process.telemetry import get_logger
from shared.wire.streams import images_key
from shared.wire.transport import Backoff, Transport, is_temporary

log = get_logger("penstock.compute")

TIMEOUT_S = 60.0  # of one image
START_TIMEOUT_S = 120.0  # until the process has imported what it needs, on a machine that is busy
NUM_TRIES = 2  # a process that is killed must not cost a request
GONE = "an image of this request is gone: send the request again"


@dataclass(frozen=True, slots=True)
class Pixels:
    """The processor's output for an image: inputs of the model's encoder by name; or why there are
    none."""

    key: str
    inputs: dict[str, Any] | Invalid


class PixelProcess:
    """Reads images' files from Redis, and has a process make pixels of them. One question at a time."""

    def __init__(self, transport: Transport, folder: Path, family: VisionFamily) -> None:
        """folder: of the library's image processor."""
        self.transport = transport
        self.family = family
        self.helper = HelperProcess("services.compute.images.pixels", str(folder))

    def start(self) -> None:
        """Have it import what it needs, so that no image waits for that."""
        with suppress(OSError, EOFError, HelperStuck):  # the first image tells of it
            self.helper.ask(b"", TIMEOUT_S, START_TIMEOUT_S + TIMEOUT_S)

    def read(self, response_id: str, image: Image) -> dict[str, Any]:
        """Inputs of the model's encoder by name. Raises Invalid."""
        data = self._file(response_id, image)
        if data is None:
            raise Invalid(GONE, status=410, code="image_gone")
        question = pack((self.family.processing(is_low=image.is_low), data))
        for _ in range(NUM_TRIES):
            try:
                answer = self.helper.ask(question, TIMEOUT_S, START_TIMEOUT_S + TIMEOUT_S)
            except (OSError, EOFError, HelperStuck, Unreadable) as error:
                log.warning("the process that reads images died, starting another", error=error or type(error).__name__)
                continue
            if isinstance(answer, Invalid):
                raise answer
            return dict(answer)
        raise Invalid("the image crashes the process that decodes it", param="messages", code="invalid_image")

    def _file(self, response_id: str, image: Image) -> bytes | None:
        """The image's file; None: it is not there. Waits for a Redis that can't serve."""
        backoff = Backoff()
        while True:
            try:
                found: Any = self.transport.client.hget(images_key(response_id), image.digest)
                return None if found is None else bytes(found)
            except (RedisError, OSError) as error:
                if not is_temporary(error):
                    raise Invalid(f"the image can't be read from Redis: {error}", status=500) from None
                threading.Event().wait(backoff.failed(error))


class PixelReader:
    """A thread with a PixelProcess. Its owner asks for few images at a time: pixels are large."""

    def __init__(self, process: PixelProcess) -> None:
        self.process = process
        self.done: queue.SimpleQueue[Pixels] = queue.SimpleQueue()
        self._asked: queue.SimpleQueue[tuple[str, Image]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="pixels", daemon=True).start()

    def ask(self, response_id: str, image: Image) -> None:
        """`done` will have the image's pixels."""
        self._asked.put((response_id, image))

    def _run(self) -> None:
        self.process.start()
        while True:
            response_id, image = self._asked.get()
            try:
                inputs: dict[str, Any] | Invalid = self.process.read(response_id, image)
            except Invalid as error:
                inputs = error
            except Exception as error:  # no memory, no more threads: the next image may have better luck
                log.exception("an image can't be read", image=image.key)
                inputs = Invalid(f"the image can't be read: {type(error).__name__}", status=500)
            self.done.put(Pixels(image.key, inputs))
