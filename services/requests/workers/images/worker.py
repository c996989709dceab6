"""`python -m services.requests.workers.images.worker`: looks at images of clients, in a process of its own that
can be killed.

A question is an image's file. The answer is its width and height, upright, once all of it could be
read, or Invalid.
"""

from shared.model.vision.pixels import load_decoders, open_image
from shared.process.worker import run_worker

MEMORY = 1 << 30  # of an image of the largest size, in several modes at once


def answer(question: bytes) -> tuple[int, int]:
    image = open_image(question)
    return image.width, image.height


if __name__ == "__main__":
    load_decoders()
    run_worker(answer, MEMORY)
