"""The codec: what is sent is what arrives, what is wrong is named, and the bytes of version 1 decode for ever."""

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import Invalid
from shared.messages import (
    ChatMessage,
    Control,
    GenerateRequest,
    Replica,
    RequestError,
    StepCandidates,
    StepDecisions,
    TokenEvent,
    TokenLogprob,
    TopLogprob,
    decode,
    encode,
)
from shared.sampling_params import SamplingParams

LOGPROB = TokenLogprob("é", b"\xc3\xa9", -0.5, (TopLogprob("a", b"a", -1.0),))


def test_version_1_bytes_decode() -> None:
    control = bytes.fromhex("95a7636f6e74726f6c01a663616e63656c92a161a162c0")
    assert decode(Control, control) == Control("cancel", ("a", "b"))
    assert encode(Control("cancel", ("a", "b"))) == control
    decisions = StepDecisions("s", 3, np.array([1, 2], np.int32), np.array([5, 6], np.int32), np.array([7, -1], np.int32), np.array([0, 1], np.uint8))
    golden = bytes.fromhex("98a96465636973696f6e7301a17303c4080100000002000000c4080500000006000000c40807000000ffffffffc4020001")
    assert encode(decisions) == golden
    assert decode(StepDecisions, golden).token_ids.tolist() == [7, -1]


@given(
    text=st.text(), position=st.integers(0, 1 << 31), reason=st.sampled_from([None, "stop", "length"]), stop=st.one_of(st.none(), st.text(), st.integers(0, 9))
)
def test_token_events_survive(text: str, position: int, reason: str | None, stop: str | int | None) -> None:
    event = TokenEvent("r", position, 5, text, 1, 2, (LOGPROB,), reason, stop, RequestError("no", 400, "x"), LOGPROB)  # type: ignore[arg-type]
    assert decode(TokenEvent, encode(event)) == event


def test_requests_survive_with_arrays_as_raw_bytes() -> None:
    params = SamplingParams(max_tokens=5, stop=("a",), logit_bias={3: -1.5}, seed=(1 << 64) - 1, logprobs=2)
    chat = GenerateRequest("r", None, "m", params, messages=(ChatMessage("user", "hi"), ChatMessage("user", "x", "name")))
    assert decode(GenerateRequest, encode(chat)) == chat
    ids = GenerateRequest("r", "g", "m", params, prompt_token_ids=np.arange(100_000, dtype=np.int32))
    packed = encode(ids)
    assert len(packed) < 400_200
    received = decode(GenerateRequest, packed).prompt_token_ids
    assert received is not None and received.dtype == np.int32 and received[-1] == 99_999


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (b"\xc1", "not msgpack"),
        (b"", "not msgpack"),
        (msgpack.packb(5), "not a control message"),
        (msgpack.packb(["token", 1, "r"]), "not a control message"),
        (msgpack.packb(["control", 2, "cancel"]), "newer than 1"),
        (msgpack.packb(["control", 1]), "expected 1 to 3 fields"),
        (msgpack.packb(["control", 1, "explode"]), "control.action: expected one of"),
        (msgpack.packb(["control", 1, "cancel", "abc"]), "control.request_ids: expected an array"),
        (msgpack.packb(["control", 1, "cancel", [1]]), "control.request_ids: expected str, got int"),
    ],
)
def test_what_is_wrong_is_named(packed: bytes, reason: str) -> None:
    with pytest.raises(Invalid, match=reason):
        decode(Control, packed)


@given(st.binary(max_size=200))
def test_noise_is_refused_and_nothing_else_happens(noise: bytes) -> None:
    for kind in (GenerateRequest, StepCandidates, TokenEvent, Replica):
        with pytest.raises(Invalid):
            decode(kind, noise)


def test_a_field_that_an_older_sender_left_out_has_its_default() -> None:
    short = msgpack.packb(["control", 1, "refresh"])
    assert decode(Control, short) == Control("refresh")
