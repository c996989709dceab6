"""The encoder's loop: an image that compute waits for, its pixels, its embeddings.

A question that is lost is asked again, and one that was answered is answered from Redis. So nothing
is acknowledged here.
"""

from typing import Any

import torch

from services.compute.images.packing import pack
from services.compute.images.reader import PixelProcess
from services.compute.images.tower import VisionTower
from shared.process.errors import Invalid
from shared.process.telemetry import get_logger
from shared.wire.load import Load
from shared.wire.messages import EncodeImage, decode
from shared.wire.stage import Stage
from shared.wire.streams import embeddings_key, wanted_images_key

log = get_logger("penstock.encoder")

TTL_S = 60  # of embeddings that were not read, and of the reason why there are none
POLL_S = 0.01  # between two looks at an empty list
IDLE_POLLS = 20  # after so many, the looks are POLL_S * IDLE_POLLS apart


class EncoderService:
    def __init__(self, stage: Stage, tower: VisionTower, pixels: PixelProcess) -> None:
        self.stage = stage
        self.tower = tower
        self.pixels = pixels
        self.key = wanted_images_key(tower.fingerprint)
        self.num_encoded = 0
        self.seconds = 0.0

    def run(self) -> None:
        self.stage.catch_signals()
        self.stage.transport.wait_until_up(self.stage.settings.redis_timeout_s)
        self.pixels.start()
        self.stage.join()
        num_empty = 0
        while not self.stage.stopping.is_set():
            question = self.next_question()
            self.stage.mark_alive()
            if question is None:
                num_empty = min(num_empty + 1, IDLE_POLLS)
                self.stage.stopping.wait(POLL_S * (IDLE_POLLS if num_empty == IDLE_POLLS else 1))
            else:
                num_empty = 0
                self.answer(question)
        self.stage.leave()
        self.pixels.helper.stop()

    def next_question(self) -> EncodeImage | None:
        [packed] = self.stage.transport.run(lambda pipe: pipe.lpop(self.key))
        if packed is None:
            return None
        try:
            return decode(EncodeImage, packed)
        except Invalid as error:
            log.error("a message can't be read", error=error)
            return None

    def answer(self, question: EncodeImage) -> None:
        image, response_id = question.image, question.response_id
        place = embeddings_key(self.tower.fingerprint, image.key)
        [is_there] = self.stage.transport.run(lambda pipe: pipe.expire(place, TTL_S))
        if is_there:
            return
        try:
            pixels = self.pixels.read(response_id, image)
            self.stage.mark_alive()
            found: Any = torch.cat([self.encode(call) for call in self.tower.calls(pixels)])
            self.num_encoded += 1
        except Invalid as error:
            found = error
        except Exception as error:  # what the library's modules raise for the image's own shape
            found = Invalid(f"the image can't be encoded: {error}", status=500)
        if isinstance(found, Invalid):  # only for this response: another may bring the image again
            place = embeddings_key(self.tower.fingerprint, image.key, response_id)
        self.stage.transport.run(lambda pipe: pipe.set(place, pack(found), ex=TTL_S))
        self.stage.load = Load(images_encoded=self.num_encoded, image_encoder_s=self.seconds)
        log.info("image encoded", response_id=response_id, error=str(found) if isinstance(found, Invalid) else "-")

    def encode(self, call: Any) -> torch.Tensor:
        embeddings, seconds = self.tower.timed(call)
        self.seconds += seconds
        self.stage.mark_alive()
        return embeddings
