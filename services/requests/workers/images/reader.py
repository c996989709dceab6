"""ImageReader: the images of a chat, from wherever they are, checked before the chat is admitted."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from services.requests.bodies.content import Content, GivenImage
from services.requests.dialects.openai.messages import Message
from services.requests.store.files.store import FileStore
from services.requests.workers.images.fetch import ImageFetcher
from services.requests.workers.pool import HelperFailed, HelperPool
from shared.model.vision.images import MAX_IMAGES, Image
from shared.model.vision.pixels import MAX_BYTES
from shared.process.errors import Invalid
from shared.wire.messages import ChatMessage, ContentPart

READ_TIMEOUT_S = 120.0  # of all images of a request
CHECK_TIMEOUT_S = 10.0  # of one image; a camera's takes a quarter of a second
MAX_OF_TENANT = 256  # images of one tenant that wait
WITHIN_S = 40.0  # with the wait for its turn
QUICK_S = 1.0
MAX_KNOWN = 4096  # images whose size is known
FETCHES = 4  # at once, of a request
CODE = "invalid_image"


class ImageReader:
    """Owns the helpers."""

    def __init__(self, files: FileStore, fetcher: ImageFetcher, max_bytes: int) -> None:
        """max_bytes: of the images of one request."""
        self.files = files
        self.max_bytes = max_bytes
        self.fetcher = fetcher
        self.helpers = HelperPool(
            "services.requests.workers.images.worker", "reading images", MAX_OF_TENANT, WITHIN_S, quick_s=QUICK_S
        )
        self._known: OrderedDict[str, tuple[int, int]] = OrderedDict()  # by digest, the last used last

    async def read(
        self, messages: Sequence[Message], tenant_id: str
    ) -> tuple[tuple[ChatMessage, ...], dict[str, bytes]]:
        """The messages of the pipeline, and the images' files by digest. Raises Invalid (400), which
        names the part; Rejected (429, 503) where others wait already."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                return await self._read(messages, tenant_id)
        except TimeoutError:
            raise Invalid(
                f"the images take more than {READ_TIMEOUT_S:g} s to fetch and read", param="messages", code=CODE
            ) from None

    async def _read(
        self, messages: Sequence[Message], tenant_id: str
    ) -> tuple[tuple[ChatMessage, ...], dict[str, bytes]]:
        given = [
            (number, each)
            for number, message in enumerate(messages)
            if isinstance(message.content, Content)
            for each in message.content.images
        ]
        if len(given) > MAX_IMAGES:
            raise Invalid(f"at most {MAX_IMAGES} images in one request, got {len(given)}", param="messages")
        fetches = self._fetches([each.url for _, each in given if each.url])
        try:
            files, images = await self._images(given, fetches, tenant_id)
        finally:
            for task in fetches.values():
                task.cancel()
            await asyncio.gather(*fetches.values(), return_exceptions=True)
        return tuple(with_images(message, number, images) for number, message in enumerate(messages)), files

    async def _images(
        self, given: list[tuple[int, GivenImage]], fetches: "Mapping[str, asyncio.Task[bytes]]", tenant_id: str
    ) -> tuple[dict[str, bytes], dict[tuple[int, str], Image]]:
        """The files by digest, and the images by the number of their message and their place there."""
        files: dict[str, bytes] = {}
        images: dict[tuple[int, str], Image] = {}
        for number, each in given:
            try:
                data = await (fetches[each.url] if each.url else self._file(each, tenant_id))
                images[number, each.place] = image = await self._image(each, data, tenant_id)
            except Invalid as error:
                raise Invalid(
                    str(error),
                    param=f"messages[{number}].content{each.place}",
                    code=error.code or CODE,
                    status=error.status,
                ) from None
            files[image.digest] = data
            if sum(map(len, files.values())) > self.max_bytes:
                raise self._too_long()
        return files, images

    def _fetches(self, urls: list[str]) -> "dict[str, asyncio.Task[bytes]]":
        """Each URL once, a few at a time, and of all no more than max_bytes."""
        turn, held = asyncio.Semaphore(FETCHES), 0

        async def fetch(url: str) -> bytes:
            nonlocal held
            async with turn:
                if held > self.max_bytes:
                    raise self._too_long()
                data = await self.fetcher.fetch(url)
                held += len(data)
                return data

        return {url: asyncio.create_task(fetch(url)) for url in dict.fromkeys(urls)}

    def _too_long(self) -> Invalid:
        return Invalid(
            f"the images of one request have at most {self.max_bytes >> 20} MiB",
            param="messages",
            code="request_exceeds_limit",
        )

    async def _file(self, given: GivenImage, tenant_id: str) -> bytes:
        if given.file_id:
            record = await self.files.load(given.file_id, tenant_id)
            if record.num_bytes > MAX_BYTES:
                raise Invalid(
                    f"an image's file has at most {MAX_BYTES >> 20} MiB, this one {record.num_bytes / (1 << 20):.1f}"
                )
            try:
                return await asyncio.to_thread(self.files.storage.read, record.path)
            except FileNotFoundError:
                raise Invalid("the file is gone", status=404) from None
        return given.data

    async def _image(self, given: GivenImage, data: bytes, tenant_id: str) -> Image:
        """Raises Invalid for what is no image within bounds."""
        if not data:
            raise Invalid("the image is empty")
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        if digest not in self._known:
            try:
                answer = await self.helpers.ask(tenant_id, data, limit_s=CHECK_TIMEOUT_S)
            except TimeoutError:
                raise Invalid(f"the image takes more than {CHECK_TIMEOUT_S:g} s to read") from None
            except HelperFailed:
                raise Invalid("the image ends the process that reads it") from None
            if isinstance(answer, Invalid):
                raise answer
            assert isinstance(answer, tuple)
            self._known[digest] = answer
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(digest)
        width, height = self._known[digest]
        return Image(digest, width, height, len(data), given.is_low)


def with_images(message: Message, number: int, images: Mapping[tuple[int, str], Image]) -> ChatMessage:
    """A message of the pipeline. images: by the number of their message, and their place there."""
    content = message.content
    if not isinstance(content, Content):
        return message.to_wire()
    parts = [
        ContentPart(image=images[number, part.place]) if isinstance(part, GivenImage) else ContentPart(part)
        for part in content.parts
    ]
    return message.to_wire(tuple(parts))
