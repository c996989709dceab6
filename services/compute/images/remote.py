"""RemoteEncoder: embeddings that encoder stages make, and compute reads from Redis.

A question is no obligation: an encoder that dies loses it, and it is asked again. Embeddings are the
same, whoever makes them, if the fingerprints are.
"""

import time
from dataclasses import dataclass

from torch import Tensor

from services.compute.images.packing import unpack
from shared.model.vision.images import Image
from shared.process.errors import Invalid
from shared.process.telemetry import get_logger
from shared.wire.images import EncodeImage
from shared.wire.line import Pipeline
from shared.wire.messages import encode
from shared.wire.stage import Stage
from shared.wire.streams import embeddings_key, wanted_images_key

log = get_logger("penstock.compute")

POLL_EVERY_S = 0.02
AGAIN_AFTER_S = 20.0  # without an answer: the encoder that had the question is gone, or many wait
MAX_TRIES = 6


@dataclass(slots=True)
class Question:
    message: EncodeImage
    asked_at: float
    num_tries: int = 1


class RemoteEncoder:
    def __init__(self, stage: Stage, fingerprint: str) -> None:
        """fingerprint: of the encoders whose embeddings are this replica's own."""
        assert stage.model is not None
        self.stage = stage
        self.model = stage.model
        self.fingerprint = fingerprint
        self._asked: dict[str, Question] = {}  # by the image's key
        self._polled_at = 0.0

    @property
    def is_there(self) -> bool:
        """Whether an encoder is alive that makes the same embeddings."""
        return any(each.fingerprint == self.fingerprint for each in self.stage.registry.of("encoder", self.model))

    def __contains__(self, key: str) -> bool:
        """Whether the image was asked for, and has not come."""
        return key in self._asked

    def ask(self, response_id: str, image: Image) -> None:
        question = Question(EncodeImage(response_id, image, self.fingerprint), time.monotonic())
        self._asked[image.key] = question
        self._push([question])

    def take(self) -> dict[str, tuple[str, Tensor | Invalid]]:
        """The answers that have come, by key: for which response, and the embeddings. Looks from time to time."""
        now = time.monotonic()
        if not self._asked or now - self._polled_at < POLL_EVERY_S:
            return {}
        self._polled_at = now
        keys = list(self._asked)
        [found] = self.stage.transport.run(lambda pipe: pipe.mget([embeddings_key(self.fingerprint, key) for key in keys]))
        came = {key: (self._asked[key].message.response_id, unpack(packed)) for key, packed in zip(keys, found, strict=True) if packed is not None}
        for key in came:
            del self._asked[key]
        late = [each for each in self._asked.values() if now - each.asked_at > AGAIN_AFTER_S]
        for each in late:
            each.asked_at, each.num_tries = now, each.num_tries + 1
        for each in [each for each in late if each.num_tries > MAX_TRIES]:
            del self._asked[each.message.image.key]
            came[each.message.image.key] = each.message.response_id, Invalid("no encoder could encode this image", status=500)
        self._push([each for each in late if each.num_tries <= MAX_TRIES])
        return came

    def forget(self) -> None:
        """Nobody is there to answer: what was asked for is to be encoded otherwise."""
        self._asked.clear()

    def _push(self, questions: list[Question]) -> None:
        def write(pipe: Pipeline) -> None:
            for each in questions:
                pipe.rpush(wanted_images_key(self.model), encode(each.message))
            pipe.expire(wanted_images_key(self.model), 3600)

        if questions:
            self.stage.transport.run(write)
