"""RemoteEncoder: embeddings that encoder stages make, and compute reads from Redis.

A request to an encoder may be lost: if the encoder dies, it is sent again. Encoders with the same
fingerprint make the same embeddings.
"""

import time
from dataclasses import dataclass

from torch import Tensor

from services.compute.images.packing import unpack
from shared.model.vision.images import Image
from shared.process.errors import Invalid
from shared.process.telemetry import get_logger
from shared.wire.line import Pipeline
from shared.wire.messages import EncodeImage, encode
from shared.wire.stage import Stage
from shared.wire.streams import embeddings_key, wanted_images_key

log = get_logger("penstock.compute")

POLL_EVERY_S = 0.02
AHEAD = 4  # questions of this replica for each encoder
AGAIN_AFTER_S = 60.0  # without an answer
MAX_TRIES = 3
WANTED_TTL_S = 600
READ_TTL_S = 5  # of embeddings that were read: for replicas that ask for the same just now


@dataclass(slots=True)
class PendingEncode:
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
        self.given_up: set[str] = set()  # keys of images that no encoder brought
        self._asked: dict[str, PendingEncode] = {}  # by the image's key
        self._encoders: frozenset[str] = frozenset()  # as seen last
        self._polled_at = 0.0

    def __contains__(self, key: str) -> bool:
        """Whether the image was asked for, and has not come."""
        return key in self._asked

    @property
    def num_free(self) -> int:
        """How many more images may be asked for: none, if no encoder is alive."""
        return max(0, AHEAD * len(self._encoders) - len(self._asked))

    @property
    def is_there(self) -> bool:
        return bool(self._encoders)

    def ask(self, response_id: str, image: Image) -> None:
        question = PendingEncode(EncodeImage(response_id, image), time.monotonic())
        self._asked[image.key] = question
        self._push([question])

    def drop(self, key: str) -> None:
        """No sequence needs the image any more. Unknown keys are ignored."""
        self._asked.pop(key, None)
        self.given_up.discard(key)

    def take(self) -> dict[str, tuple[str, Tensor | Invalid]]:
        """The answers that have come, by key: for which response, and the embeddings. Looks from time to time."""
        now = time.monotonic()
        if now - self._polled_at < POLL_EVERY_S:
            return {}
        self._polled_at = now
        has_lost_one = self._look_for_encoders()
        if not self._asked:
            return {}
        came = self._read(list(self._asked.values()))
        for key in came:
            del self._asked[key]
        late = [each for each in self._asked.values() if has_lost_one or now - each.asked_at > AGAIN_AFTER_S]
        for each in late:
            each.asked_at, each.num_tries = now, each.num_tries + 1
        for key in [each.message.image.key for each in late if each.num_tries > MAX_TRIES]:
            log.warning("no encoder could encode an image, encoding it here", image=key)
            del self._asked[key]
            self.given_up.add(key)
        self._push([each for each in late if each.num_tries <= MAX_TRIES])
        return came

    def _look_for_encoders(self) -> bool:
        """Returns whether one has gone that may have had a question. Without any, what was asked for is
        to be encoded otherwise."""
        found = frozenset(
            each.replica_id
            for each in self.stage.registry.of("encoder", self.model)
            if each.fingerprint == self.fingerprint
        )
        has_lost_one = bool(self._encoders - found)
        self._encoders = found
        if not found:
            self._asked.clear()
        return has_lost_one

    def _read(self, questions: list[PendingEncode]) -> dict[str, tuple[str, Tensor | Invalid]]:
        messages = [question.message for question in questions]
        places = [embeddings_key(self.fingerprint, each.image.key) for each in messages]
        refusals = [embeddings_key(self.fingerprint, each.image.key, each.response_id) for each in messages]
        [found] = self.stage.transport.run(lambda pipe: pipe.mget([*places, *refusals]))
        came: dict[str, tuple[str, Tensor | Invalid]] = {}
        for message, embeddings, refusal in zip(messages, found, found[len(messages) :], strict=False):
            if (packed := embeddings if embeddings is not None else refusal) is not None:
                came[message.image.key] = message.response_id, unpack(packed)
        if read := [place for place, packed in zip(places, found, strict=False) if packed is not None]:
            self._shorten(read)
        return came

    def _shorten(self, places: list[str]) -> None:
        def write(pipe: Pipeline) -> None:
            for place in places:
                pipe.expire(place, READ_TTL_S)

        self.stage.transport.run(write)

    def _push(self, questions: list[PendingEncode]) -> None:
        key = wanted_images_key(self.fingerprint)

        def write(pipe: Pipeline) -> None:
            for question in questions:
                pipe.rpush(key, encode(question.message))
            pipe.expire(key, WANTED_TTL_S)

        if questions:
            self.stage.transport.run(write)
