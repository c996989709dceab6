"""The files of a response's images in Redis: there with the response, and no longer."""

import asyncio

import numpy as np

from services.requests.store.admission.admission import UNSUBMITTED_TTL_S, Admission
from services.requests.store.client import connect
from services.requests.store.tenants.limits import Caller
from services.requests.store.tenants.tenant import NOBODY
from shared.model.sampling_params import SamplingParams
from shared.process.settings import GatewaySettings
from shared.wire.messages import GenerateRequest
from shared.wire.stage import Stage
from shared.wire.streams import images_key


def test_a_second_submit_shortens_nobody_s_life(redis_url: str) -> None:
    settings = GatewaySettings(redis_url=redis_url)
    request = GenerateRequest("r-1.0", "g", "m", SamplingParams(max_tokens=4), prompt_token_ids=np.array([3], np.int32))

    async def run() -> None:
        client = connect(settings)
        admission = Admission(Stage("gateway", settings), client, settings)
        for _ in range(2):
            await admission.submit(Caller(NOBODY), "r-1", b"record", "m", [request], images={"ab": b"file"})
            assert await client.ttl(images_key("r-1")) > UNSUBMITTED_TTL_S
            assert await client.hgetall(images_key("r-1")) == {b"ab": b"file"}
        await client.aclose()

    asyncio.run(run())
