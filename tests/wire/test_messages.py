"""The codec: what is sent is what arrives, what is wrong is named, and the bytes of this version
and the one before decode.
"""

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import NODEFAULT, Struct
from msgspec.structs import astuple, fields, replace

from shared.model.sampling_params import SamplingParams
from shared.process.errors import Invalid
from shared.wire.messages import (
    TAGS,
    ChatMessage,
    Control,
    GenerateRequest,
    RequestError,
    StepCandidates,
    StepDecisions,
    TokenEvent,
    decode,
    encode,
)
from shared.wire.registry import decode_replicas
from shared.wire.replica import Replica
from tests.wire.golden import CANDIDATES, GENERATE, GOLDEN, LOGPROB, PROMPT_LOGPROBS, REPLICA, Golden, f32, i32


def plain(value: Any) -> Any:
    """The same with lists for arrays, so that it can be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    if isinstance(value, Struct):
        return type(value), [plain(item) for item in astuple(value)]
    return [plain(each) for each in value] if isinstance(value, tuple) else value


def name_of(golden: Golden) -> str:
    return type(golden.message).__name__


@pytest.mark.parametrize("golden", GOLDEN, ids=name_of)
def test_a_message_has_the_bytes_that_it_always_had(golden: Golden) -> None:
    assert encode(golden.message).hex() == golden.now
    assert plain(decode(type(golden.message), bytes.fromhex(golden.now))) == plain(golden.message)


@pytest.mark.parametrize("golden", [each for each in GOLDEN if each.before], ids=name_of)
def test_the_version_before_decodes_with_defaults(golden: Golden) -> None:
    assert plain(decode(type(golden.message), bytes.fromhex(golden.before))) == plain(golden.message_before)


def test_every_message_has_golden_bytes_with_every_field_set() -> None:
    assert [type(golden.message) for golden in GOLDEN] == list(TAGS)
    for message in (golden.message for golden in GOLDEN):
        for each in fields(message):
            if each.default is not NODEFAULT:
                assert plain(getattr(message, each.name)) != plain(each.default), (
                    f"{type(message).__name__}.{each.name}"
                )


def test_defaults_at_the_end_are_not_written() -> None:
    event = TokenEvent("r", 3, 5, "x", 7)
    assert msgpack.unpackb(encode(event)) == ["token", 1, "r", 3, 5, "x", 7]
    assert decode(TokenEvent, encode(event)) == event
    assert msgpack.unpackb(encode(replace(event, finish_reason="stop")))[2:] == ["r", 3, 5, "x", 7, 0, None, "stop"]
    packed = msgpack.unpackb(encode(replace(CANDIDATES.message, temperatures=f32())), strict_map_key=False)
    assert len(packed) == 2 + len(StepCandidates.__struct_fields__), "arrays are, empty or not"
    sampler = msgpack.unpackb(encode(Replica("sampler", "sampler-1", "host", 7, 1.5)))
    assert sampler[-1] == {} and len(sampler) == 3 + Replica.__struct_fields__.index("load"), "maps are not"


def test_the_first_bytes_ever_written_decode() -> None:
    control = bytes.fromhex("95a7636f6e74726f6c01a663616e63656c92a161a162c0")
    assert decode(Control, control) == Control("cancel", ("a", "b"))
    decisions = bytes.fromhex(
        "98a96465636973696f6e7301a17303c4080100000002000000c4080500000006000000c40807000000ffffffffc4020001"
    )
    handles, positions, token_ids = (np.array(values, np.int32) for values in ([1, 2], [5, 6], [7, -1]))
    assert plain(decode(StepDecisions, decisions)) == plain(
        StepDecisions("s", 3, handles, positions, token_ids, np.array([0, 1], np.uint8))
    )


@pytest.mark.parametrize("golden", GOLDEN, ids=name_of)
def test_bytes_that_are_cut_off_or_followed_by_others_are_refused(golden: Golden) -> None:
    whole = bytes.fromhex(golden.now)
    for packed in (whole[:-1], whole[: len(whole) // 2], whole + b"\x00"):
        with pytest.raises(Invalid):
            decode(type(golden.message), packed)


@given(
    text=st.text(),
    position=st.integers(0, 1 << 31),
    reason=st.sampled_from([None, "stop", "length"]),
    stop=st.one_of(st.none(), st.text(), st.integers(0, 9)),
)
def test_token_events_survive(text: str, position: int, reason: str | None, stop: str | int | None) -> None:
    event = TokenEvent("r", position, 5, text, 1, 2, (LOGPROB,), reason, stop, RequestError("no", 400, "x"), LOGPROB)  # type: ignore[arg-type]
    assert decode(TokenEvent, encode(event)) == event


def test_requests_survive_with_arrays_as_raw_bytes() -> None:
    params = SamplingParams(max_tokens=5, stop=("a",), logit_bias={3: -1.5}, seed=(1 << 64) - 1, logprobs=2)
    chat = GenerateRequest(
        "r", None, "m", params, messages=(ChatMessage("user", "hi"), ChatMessage("user", "x", "name"))
    )
    assert decode(GenerateRequest, encode(chat)) == chat
    ids = GenerateRequest("r", "g", "m", params, prompt_token_ids=np.arange(100_000, dtype=np.int32))
    packed = encode(ids)
    assert len(packed) < 400_200
    received = decode(GenerateRequest, packed).prompt_token_ids
    assert received is not None and received.dtype == np.int32 and received[-1] == 99_999


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (b"\xc1", "not a control message"),
        (b"", "not a control message"),
        (msgpack.packb(5), "not a control message"),
        (msgpack.packb(["token", 1, "r"]), "not a control message"),
        (msgpack.packb(["control", 2, "cancel"]), "newer than 1"),
        (msgpack.packb(["control", 1]), "expected `array` of at least length 1, got 0"),
        (msgpack.packb(["control", 1, "explode"]), "control.action: invalid enum value"),
        (msgpack.packb(["control", 1, "cancel", "abc"]), "control.request_ids: expected `array`, got `str`"),
        (msgpack.packb(["control", 1, "cancel", [1]]), "control.request_ids: expected `str`, got `int`"),
    ],
)
def test_what_is_wrong_is_named(packed: bytes, reason: str) -> None:
    with pytest.raises(Invalid, match=reason):
        decode(Control, packed)


def test_a_wrong_value_is_named_with_the_fields_around_it() -> None:
    params = msgpack.packb(["generate", 1, "r", None, "m", [None, "2"]])
    with pytest.raises(Invalid, match="^generate.params.min_tokens: expected `int`, got `str`$"):
        decode(GenerateRequest, params)
    top = msgpack.packb(["token", 1, "r", 1, 5, "x", 0, 0, [["x", b"x", -1.0, [["y", "y"]]]]])
    with pytest.raises(Invalid, match="^token.logprobs.top.raw: expected `bytes`, got `str`$|^token.logprobs.top: "):
        decode(TokenEvent, top)


@pytest.mark.parametrize(
    "wrong",
    [
        {"positions": [3]},
        {"counts": [2]},
        {"tail_token_ids": [1, 2, 3]},
        {"previous_token_ids": [8]},
        {"counts": [3, 0]},
        {"counts": [2, 2]},
        {"positions": [0, 1]},
        {"token_ids": [10, 11]},
    ],
)
def test_candidates_whose_columns_do_not_fit_are_refused(wrong: dict[str, list[int]]) -> None:
    """As they come in: the bytes of such a step are made by hand."""
    packed = msgpack.unpackb(bytes.fromhex(CANDIDATES.now), strict_map_key=False)
    names = StepCandidates.__struct_fields__
    for name, values in wrong.items():
        packed[2 + names.index(name)] = np.array(values, np.int32).tobytes()
    with pytest.raises(Invalid, match="StepCandidates: "):
        decode(StepCandidates, msgpack.packb(packed))


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_ids": i32(3)},
        {"token_ids": i32(*range(9))},
        {"ranks": i32()},
        {"ranks": i32(*range(9))},
        {"top_token_ids": i32(6, 7)},
        {"top_logprobs": f32()},
        {"texts": ("a",)},
        {"texts": ("a",) * 9},
        {"text_offsets": i32(0)},
        {"text_offsets": i32(*range(9))},
    ],
)
def test_logprobs_of_a_prompt_whose_columns_do_not_fit_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match="PromptLogprobs: "):
        replace(PROMPT_LOGPROBS, **wrong)


@given(st.binary(max_size=200))
def test_noise_is_refused_and_nothing_else_happens(noise: bytes) -> None:
    for kind in (GenerateRequest, StepCandidates, TokenEvent, Replica):
        with pytest.raises(Invalid):
            decode(kind, noise)


def test_a_field_that_an_older_sender_left_out_has_its_default() -> None:
    short = msgpack.packb(["control", 1, "refresh"])
    assert decode(Control, short) == Control("refresh")


def test_a_constraint_of_the_version_before_knows_no_thoughts() -> None:
    """A gateway of that version beside newer stages: its constraint is shorter."""
    message = GENERATE.message
    assert isinstance(message, GenerateRequest) and message.constraint is not None
    shorter = [
        each[:4] if isinstance(each, list) and each[:1] == ["json_schema"] else each
        for each in msgpack.unpackb(encode(message), strict_map_key=False)
    ]
    decoded = decode(GenerateRequest, msgpack.packb(shorter))
    assert decoded.constraint == replace(message.constraint, thought_begin="", thought_end="")


def test_an_announcement_of_a_newer_version_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """It comes again each second, to every process."""
    announced = [
        ("compute:of-tomorrow", msgpack.packb(["replica", 99])),
        ("compute:now", bytes.fromhex(REPLICA.now)),
        ("compute:dead", None),
    ]
    for _ in range(3):
        assert decode_replicas(announced) == (REPLICA.message,)
    assert sum("does not decode" in record.getMessage() for record in caplog.records) == 1


def test_what_a_newer_version_adds_to_an_announcement_is_passed_over() -> None:
    newer = msgpack.packb([*msgpack.unpackb(bytes.fromhex(REPLICA.now), strict_map_key=False), "of tomorrow"])
    assert plain(decode(Replica, newer)) == plain(REPLICA.message)


# as compute of the version before announces itself: its load was a map of any names to numbers
LOAD_BEFORE = {
    "running": 2,
    "waiting": 0,
    "max_num_seqs": 64,
    "kv_cache_usage": 0.5,
    "step_cost_fixed_s": 0.25,
    "steps": 7,
    "iteration_tokens": 9,
    "step_schedule_s": 0.5,
    "step_wait_s": 1.5,
    "iteration_tokens_1": 6.0,
    "iteration_tokens_8": 1.0,
    "iteration_tokens_inf": 0.0,
}


def with_load(load: Any) -> bytes:
    """The announcement of golden.py with another load on the wire."""
    packed = msgpack.unpackb(bytes.fromhex(REPLICA.now), strict_map_key=False)
    packed[2 + Replica.__struct_fields__.index("load")] = load
    changed: bytes = msgpack.packb(packed)
    return changed


def test_a_load_of_the_version_before_decodes_and_has_the_same_form_again() -> None:
    load = decode(Replica, with_load(LOAD_BEFORE)).load
    assert (load.running, load.steps, load.kv_cache_usage, load.sequences) == (2, 7, 0.5, None)
    assert load.step_s == {"schedule": 0.5, "wait": 1.5}
    assert list(load.steps_by_tokens.items()) == [("1", 6.0), ("8", 1.0), ("inf", 0.0)]
    assert load.packed() == LOAD_BEFORE


def test_figures_of_a_load_that_only_a_newer_version_knows_are_passed_over() -> None:
    newer = LOAD_BEFORE | {"watts": [1, 2], 5: "five", "iteration_tokens_many": 1.0, "step_dream_s": None}
    assert decode(Replica, with_load(newer)).load == decode(Replica, with_load(LOAD_BEFORE)).load


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        "x",
        {"running": "2"},
        {"running": True},
        {"steps": None},
        {"step_wait_s": float("nan")},
        {"iteration_tokens_8": "1"},
    ],
)
def test_a_load_with_something_else_than_numbers_is_refused(wrong: Any) -> None:
    with pytest.raises(Invalid, match="replica.load: expected"):
        decode(Replica, with_load(wrong))


def test_numbers_of_numpy_travel_as_python_s_own() -> None:
    event = TokenEvent("r", 1, 5, "x", logprobs=(replace(LOGPROB, logprob=np.float64(-0.5)),))
    assert encode(event) == encode(replace(event, logprobs=(LOGPROB,)))
    with pytest.raises(TypeError, match="int64 has no form in a message"):
        encode(replace(event, position=np.int64(1)))


def test_a_field_nested_without_end_is_refused() -> None:
    head, rest = with_load("LOAD").split(msgpack.packb("LOAD"))
    with pytest.raises(Invalid, match="replica: not msgpack: .*recursion"):
        decode(Replica, head + b"\x91" * 100_000 + b"\xc0" + rest)


def test_a_replica_announces_whole_numbers_as_such() -> None:
    """The gateway puts them into a request, whose max_tokens is no float."""
    announced = replace(REPLICA.message, sampling={"max_tokens": 1024, "top_p": 1.0})
    read = decode(Replica, encode(announced)).sampling
    assert read == {"max_tokens": 1024, "top_p": 1.0} and isinstance(read["max_tokens"], int)
