"""The bytes of every message, as this version writes them and as the one before did; and what they say.

They never change: a field that is added later makes the bytes of today those of the version before.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from shared.model.constraint import Constraint
from shared.model.sampling_params import ChainParams, DryParams, SamplingParams
from shared.model.segments import Segment
from shared.model.vision.images import Image, PromptImage
from shared.wire.load import Load
from shared.wire.logprobs import PromptLogprobs, TokenLogprob, TopLogprob
from shared.wire.messages import (
    ChatMessage,
    ChatOptions,
    ContentPart,
    Control,
    EmbeddingParams,
    EncodeImage,
    EncodingParams,
    GenerateRequest,
    ModulePart,
    Moments,
    Offer,
    PromptModule,
    RequestError,
    SchedulingParams,
    SequenceIntro,
    StepCandidates,
    StepDecisions,
    StepEvents,
    TokenEvent,
    TokenizedRequest,
    ToolCall,
)
from shared.wire.replica import Replica
from shared.wire.views import ComputeView, SequenceView


@dataclass(frozen=True)
class Golden:
    """A message with every field set, and its bytes in hexadecimal."""

    message: Any
    now: str
    before: str = ""  # of the version before, where they were others
    defaults: dict[str, Any] = field(default_factory=dict)  # that stand in for what those bytes do not say

    @property
    def message_before(self) -> Any:
        return replace(self.message, **self.defaults)


def i32(*values: int) -> Any:
    return np.array(values, np.int32)


def f32(*values: float) -> Any:
    return np.array(values, np.float32)


PARAMS = SamplingParams(
    max_tokens=16,
    min_tokens=2,
    temperature=0.5,
    top_k=40,
    top_p=0.75,
    min_p=0.25,
    seed=1 << 63,
    stop=("\n\n",),
    stop_token_ids=(7,),
    ignore_eos=True,
    frequency_penalty=0.5,
    presence_penalty=-0.5,
    repetition_penalty=1.25,
    logit_bias={5: -1.5},
    logprobs=2,
    prompt_logprobs=3,
    allowed_token_ids=(5, 7),
    bad_words=("no",),
    bad_words_token_ids=((5,), (6, 7)),
    dry=DryParams(0.5, base=2.0, allowed_length=3, penalty_last_n=64, sequence_breakers=("\n",)),
    chain=ChainParams(1.5, 0.5, 0.25, 0.125, 0.75, 2.0),
    skip_special_tokens=False,
    include_stop_str_in_output=True,
    returns_prompt_token_ids=True,
)
SCHEDULING = SchedulingParams(priority=-1, deadline_at=2.5, group_id="g", cache_salt="salt", tenant_id="tenant-1")
SCHEDULING_BEFORE = replace(SCHEDULING, tenant_id="")
CONSTRAINT = Constraint(
    "json_schema", '{"type":"null"}', param="response_format", is_lenient=True, thought_begin="[", thought_end="]"
)
PARAMS_BEFORE = replace(
    PARAMS,
    allowed_token_ids=(),
    bad_words=(),
    bad_words_token_ids=(),
    skip_special_tokens=True,
    dry=None,
    chain=None,
    include_stop_str_in_output=False,
    returns_prompt_token_ids=False,
)
IMAGE = Image("ab12", 640, 480, 9000, is_low=True)
MESSAGE = ChatMessage(
    "assistant",
    "hi",
    "ann",
    (ToolCall("call-1", "add", '{"a":1}'),),
    tool_call_id="call-0",
    reasoning="hm",
    parts=(ContentPart("hi"), ContentPart("", IMAGE)),
)
CHAT = ChatOptions(
    "[]",
    documents="[{}]",
    template_kwargs="{}",
    chat_template="{{ messages }}",
    add_generation_prompt=False,
    continue_final_message=True,
)
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
EMBEDDING = EmbeddingParams("mean", 2, is_normalized=False)
LOGPROB = TokenLogprob(
    "é", b"\xc3\xa9", -0.5, (TopLogprob("a", b"a", -1.25, token_id=6),), text_offset=7, token_id=5, is_end=True
)
LOGPROB_BEFORE = replace(LOGPROB, top=(TopLogprob("a", b"a", -1.25),), token_id=-1, is_end=False)
PROMPT_LOGPROBS = PromptLogprobs(
    token_ids=i32(3, 4),
    logprobs=f32(-1.5),
    ranks=i32(2),
    top_token_ids=i32(6),
    top_logprobs=f32(-0.25),
    spelled_token_ids=i32(3, 4, 6),
    texts=("a", "é", "c"),
    text_offsets=i32(0, 1),
)

GENERATE_NOW = (
    "dc0015a867656e657261746501a57265712d31a9676174657761792d31a56d6f64656cdc00181002cb3fe000000000000028cb3fe8000000000000cb3fd0000000000000cf80"
    "0000000000000091a20a0a9107c3cb3fe0000000000000cbbfe0000000000000cb3ff40000000000008105cbbff8000000000000020392050791a26e6f929105920607c295cb"
    "3fe0000000000000cb4000000000000000034091a10a96cb3ff8000000000000cb3fe0000000000000cb3fd0000000000000cb3fc0000000000000cb3fe8000000000000cb40"
    "00000000000000c3c39197a9617373697374616e74a26869a3616e6e9193a663616c6c2d31a3616464a77b2261223a317da663616c6c2d30a2686d9291a2686992a095a46162"
    "3132cd0280cd01e0cd2328c3a474657874c4080100000002000000c3cb3ff800000000000095ffcb4004000000000000a167a473616c74a874656e616e742d3196ab6a736f6e"
    "5f736368656d61af7b2274797065223a226e756c6c227daf726573706f6e73655f666f726d6174c3a15ba15d96a25b5da45b7b7d5da27b7dae7b7b206d65737361676573207d"
    "7dc2c395c3c207c3c3a8746f6b656e697a6593a46d65616e02c2d93730302d30616637363531393136636434336464383434386562323131633830333139632d623761643662"
    "373136393230333333312d3031a470616972a4746578749193a16d09929200c40801000000020000009502c400a463697479a4526f6d6507"
)
GENERATE_BEFORE = (
    "9ca867656e657261746501a57265712d31a9676174657761792d31a56d6f64656cdc00101002cb3fe000000000000028cb3fe8000000000000cb3fd0000000000000cf800000"
    "000000000091a20a0a9107c3cb3fe0000000000000cbbfe0000000000000cb3ff40000000000008105cbbff800000000000002039193a475736572a26869a3616e6ea4746578"
    "74c4080100000002000000c3cb3ff800000000000094ffcb4004000000000000a167a473616c74"
)
GENERATE = Golden(
    GenerateRequest(
        "req-1",
        "gateway-1",
        "model",
        PARAMS,
        messages=(MESSAGE,),
        prompt="text",
        prompt_token_ids=i32(1, 2),
        echo=True,
        created_at=1.5,
        scheduling=SCHEDULING,
        constraint=CONSTRAINT,
        chat=CHAT,
        encoding=EncodingParams(True, False, 7, return_token_strs=True, keeps_beginning=True),
        task="tokenize",
        embedding=EMBEDDING,
        traceparent=TRACEPARENT,
        pair="pair",
        prediction="text",
        modules=(PromptModule("m", 9, (ModulePart(0, i32(1, 2)), ModulePart(2, i32(), "city", "Rome", 7))),),
    ),
    GENERATE_NOW,
    GENERATE_BEFORE,
    {
        "constraint": None,
        "chat": ChatOptions(),
        "params": PARAMS_BEFORE,
        "messages": (ChatMessage("user", "hi", "ann"),),
        "encoding": EncodingParams(),
        "task": "generate",
        "embedding": None,
        "traceparent": "",
        "scheduling": SCHEDULING_BEFORE,
        "pair": None,
        "prediction": "",
        "modules": (),
    },
)

TOKENIZED_NOW = (
    "dc0015a9746f6b656e697a656401a57265712d31a9676174657761792d31a56d6f64656cdc00181002cb3fe000000000000028cb3fe8000000000000cb3fd0000000000000cf"
    "800000000000000091a20a0a9107c3cb3fe0000000000000cbbfe0000000000000cb3ff40000000000008105cbbff8000000000000020392050791a26e6f929105920607c295"
    "cb3fe0000000000000cb4000000000000000034091a10a96cb3ff8000000000000cb3fe0000000000000cb3fd0000000000000cb3fc0000000000000cb3fe8000000000000cb"
    "4000000000000000c3c3c4080300000004000000920102a46563686fcb3ff800000000000095ffcb4004000000000000a167a473616c74a874656e616e742d31c40800000000"
    "0100000096ab6a736f6e5f736368656d61af7b2274797065223a226e756c6c227daf726573706f6e73655f666f726d6174c3a15ba15dc4140100000005000000020000000600"
    "00000700000093a46d65616e02c2d93730302d30616637363531393136636434336464383434386562323131633830333139632d623761643662373136393230333333312d30"
    "31cb4004000000000000c4080300000005000000929201009301099100919495a461623132cd0280cd01e0cd2328c302010203"
)
TOKENIZED_BEFORE = (
    "9ca9746f6b656e697a656401a57265712d31a9676174657761792d31a56d6f64656cdc00101002cb3fe000000000000028cb3fe8000000000000cb3fd0000000000000cf8000"
    "00000000000091a20a0a9107c3cb3fe0000000000000cbbfe0000000000000cb3ff40000000000008105cbbff80000000000000203c4080300000004000000920102a4656368"
    "6fcb3ff800000000000094ffcb4004000000000000a167a473616c74c4080000000001000000"
)
TOKENIZED = Golden(
    TokenizedRequest(
        "req-1",
        "gateway-1",
        "model",
        PARAMS,
        prompt_token_ids=i32(3, 4),
        eos_token_ids=(1, 2),
        echo_text="echo",
        created_at=1.5,
        scheduling=SCHEDULING,
        echo_offsets=i32(0, 1),
        constraint=CONSTRAINT,
        dry_breakers=i32(1, 5, 2, 6, 7),
        embedding=EMBEDDING,
        traceparent=TRACEPARENT,
        tokenized_at=2.5,
        prediction_token_ids=i32(3, 5),
        segments=(Segment(1, 0), Segment(1, 9, (0,))),
        images=(PromptImage(IMAGE, 2, 1, 2),),
        image_token_id=3,
    ),
    TOKENIZED_NOW,
    TOKENIZED_BEFORE,
    {
        "constraint": None,
        "params": PARAMS_BEFORE,
        "dry_breakers": i32(),
        "embedding": None,
        "traceparent": "",
        "tokenized_at": 0.0,
        "scheduling": SCHEDULING_BEFORE,
        "prediction_token_ids": i32(),
        "segments": (),
        "images": (),
        "image_token_id": 0,
    },
)

CANDIDATES_NOW = (
    "dc0012aa63616e6469646174657302a9636f6d707574652d310791dc001104a57265712d31a9676174657761792d31dc00181002cb3fe000000000000028cb3fe80000000000"
    "00cb3fd0000000000000cf800000000000000091a20a0a9107c3cb3fe0000000000000cbbfe0000000000000cb3ff40000000000008105cbbff8000000000000020392050791"
    "a26e6f929105920607c295cb3fe0000000000000cb4000000000000000034091a10a96cb3ff8000000000000cb3fe0000000000000cb3fd0000000000000cb3fc00000000000"
    "00cb3fe8000000000000cb4000000000000000c3c392010209c4080300000004000000a46563686f080598c4080300000004000000c4040000c0bfc40402000000c404060000"
    "00c404000080bec40c03000000040000000600000093a161a2c3a9a163c4080000000001000000c4080300000004000000d93730302d30616637363531393136636434336464"
    "383434386562323131633830333139632d623761643662373136393230333333312d3031cb4004000000000000cb400c000000000000a466705f31c4080300000005000000c4"
    "0402000000c4080400000005000000c4080300000001000000c4080200000001000000c40c0a0000000b0000000c000000c40c000020400000c03f0000003fc4080000404000"
    "000000c4080200000001000000c410000000000000d03f0000000000000000c40863000000ffffffffc408000000bf00000000c40808000000ffffffffc4080000403f000080"
    "bf"
)
CANDIDATES_BEFORE = (
    "dc0011aa63616e6469646174657302a9636f6d707574652d3107919b04a57265712d31a9676174657761792d31dc00101002cb3fe000000000000028cb3fe8000000000000cb"
    "3fd0000000000000cf800000000000000091a20a0a9107c3cb3fe0000000000000cbbfe0000000000000cb3ff40000000000008105cbbff8000000000000020392010209c408"
    "0300000004000000a46563686f080598c4080300000004000000c4040000c0bfc40402000000c40406000000c404000080bec40c03000000040000000600000093a161a2c3a9"
    "a163c4080000000001000000c40402000000c4080400000005000000c4080300000001000000c4080200000001000000c40c0a0000000b0000000c000000c40c000020400000"
    "c03f0000003fc4080000404000000000c4080200000001000000c410000000000000d03f0000000000000000c40863000000ffffffffc408000000bf00000000c40808000000"
    "ffffffff"
)
INTRO = SequenceIntro(
    4,
    "req-1",
    "gateway-1",
    PARAMS,
    eos_token_ids=(1, 2),
    num_prompt_tokens=9,
    prompt_tail=i32(3, 4),
    echo_text="echo",
    num_cached_tokens=8,
    num_decided_tokens=5,
    prompt_logprobs=PROMPT_LOGPROBS,
    prompt_token_ids=i32(3, 4),
    traceparent=TRACEPARENT,
    tokenized_at=2.5,
    scheduled_at=3.5,
    fingerprint="fp_1",
    prediction_token_ids=i32(3, 5),
)
CANDIDATES = Golden(
    StepCandidates(
        "compute-1",
        7,
        (INTRO,),
        forget=i32(2),
        handles=i32(4, 5),
        positions=i32(3, 1),
        counts=i32(2, 1),
        token_ids=i32(10, 11, 12),
        logits=f32(2.5, 1.5, 0.5),
        logsumexp=f32(3.0, 0.0),
        num_kept=i32(2, 1),
        tail_mass=np.array([0.25, 0.0]),
        tail_token_ids=i32(99, -1),
        tail_logits=f32(-0.5, 0.0),
        previous_token_ids=i32(8, -1),
        temperatures=f32(0.75, -1.0),
    ),
    CANDIDATES_NOW,
    CANDIDATES_BEFORE,
    {
        "intros": (
            replace(
                INTRO,
                params=PARAMS_BEFORE,
                prompt_token_ids=None,
                traceparent="",
                tokenized_at=0.0,
                scheduled_at=0.0,
                fingerprint="",
                prediction_token_ids=i32(),
            ),
        ),
        "temperatures": f32(),
    },
)

DECISIONS_NOW = (
    "98a96465636973696f6e7301a973616d706c65722d3107c4080400000005000000c4080300000001000000c4080a000000ffffffffc4020001"
)
DECISIONS = Golden(
    StepDecisions("sampler-1", 7, i32(4, 5), i32(3, 1), token_ids=i32(10, -1), is_finished=np.array([0, 1], np.uint8)),
    DECISIONS_NOW,
)

TOKEN_NOW = (
    "dc0013a5746f6b656e01a57265712d31032aa2c3a909089197a2c3a9c402c3a9cbbfe00000000000009194a161c40161cbbff4000000000000060705c3a473746f70a20a0a94"
    "a26e6fcd0190a473746f70a362616497a2c3a9c402c3a9cbbfe00000000000009194a161c40161cbbff4000000000000060705c398c4080300000004000000c4040000c0bfc4"
    "0402000000c40406000000c404000080bec40c03000000040000000600000093a161a2c3a9a163c4080000000001000000c4080300000004000000c4080000003f000000c0a8"
    "67756d62656c2d31a466705f31920402"
)
TOKEN_BEFORE = (
    "9ea5746f6b656e01a57265712d31032aa2c3a909089195a2c3a9c402c3a9cbbfe00000000000009193a161c40161cbbff400000000000007a473746f70a20a0a94a26e6fcd01"
    "90a473746f70a362616495a2c3a9c402c3a9cbbfe00000000000009193a161c40161cbbff40000000000000798c4080300000004000000c4040000c0bfc40402000000c40406"
    "000000c404000080bec40c03000000040000000600000093a161a2c3a9a163c4080000000001000000"
)
TOKEN = Golden(
    TokenEvent(
        "req-1",
        3,
        42,
        "é",
        num_prompt_tokens=9,
        num_cached_tokens=8,
        logprobs=(LOGPROB,),
        finish_reason="stop",
        stop_reason="\n\n",
        error=RequestError("no", 400, "stop", "bad"),
        withheld=LOGPROB,
        prompt_logprobs=PROMPT_LOGPROBS,
        prompt_token_ids=i32(3, 4),
        embedding=f32(0.5, -2.0),
        draw="gumbel-1",
        fingerprint="fp_1",
        prediction_tokens=(4, 2),
    ),
    TOKEN_NOW,
    TOKEN_BEFORE,
    {
        "prompt_token_ids": None,
        "embedding": None,
        "draw": None,
        "fingerprint": "",
        "logprobs": (LOGPROB_BEFORE,),
        "withheld": LOGPROB_BEFORE,
        "prediction_tokens": (),
    },
)

EVENTS_NOW = (
    "94a66576656e74730192c4b59ea5746f6b656e01a57265712d31032aa2c3a909089195a2c3a9c402c3a9cbbfe00000000000009193a161c40161cbbff400000000000007a473"
    "746f70a20a0a94a26e6fcd0190a473746f70a362616495a2c3a9c402c3a9cbbfe00000000000009193a161c40161cbbff40000000000000798c4080300000004000000c40400"
    "00c0bfc40402000000c40406000000c404000080bec40c03000000040000000600000093a161a2c3a9a163c4080000000001000000c401009197a57265712d3101cb40040000"
    "00000000cb400c000000000000cb4012000000000000a9636f6d707574652d31a973616d706c65722d31"
)
EVENTS_BEFORE = (
    "93a66576656e74730192c4b59ea5746f6b656e01a57265712d31032aa2c3a909089195a2c3a9c402c3a9cbbfe00000000000009193a161c40161cbbff400000000000007a473"
    "746f70a20a0a94a26e6fcd0190a473746f70a362616495a2c3a9c402c3a9cbbfe00000000000009193a161c40161cbbff40000000000000798c4080300000004000000c40400"
    "00c0bfc40402000000c40406000000c404000080bec40c03000000040000000600000093a161a2c3a9a163c4080000000001000000c40100"
)
EVENT = bytes.fromhex(EVENTS_BEFORE)[12:-3]  # any bytes: an event of an older version
EVENTS = Golden(
    StepEvents((EVENT, b"\x00"), moments=(Moments("req-1", 1, 2.5, 3.5, 4.5, "compute-1", sampler_id="sampler-1"),)),
    EVENTS_NOW,
    EVENTS_BEFORE,
    {"moments": ()},
)

CONTROL_NOW = "96a7636f6e74726f6c01a661747461636892a57265712d31a57265712d32a9676174657761792d3203"
CONTROL_BEFORE = "95a7636f6e74726f6c01a661747461636892a57265712d31a57265712d32a9676174657761792d32"
CONTROL = Golden(
    Control("attach", ("req-1", "req-2"), "gateway-2", generation=3), CONTROL_NOW, CONTROL_BEFORE, {"generation": 0}
)

OFFER = Golden(Offer("5-0"), "93a56f6666657201a3352d30")
ENCODE = Golden(EncodeImage("req-1", IMAGE), "94a6656e636f646501a57265712d3195a461623132cd0280cd01e0cd2328c3")
REPLICA_NOW = (
    "dc0019a77265706c69636101a7636f6d70757465a9636f6d707574652d31a4686f73747bcb3ff8000000000000a56d6f64656ccd1000"
    "cb3fd000000000000081a772756e6e696e67cb400000000000000091a5616c696173a74c4f4144494e4781aa746f6f6c5f63616c6c73"
    "a66865726d6573a26670c381ab74656d7065726174757265cb3fe000000000000091a54c4142454cc381a86e5f706172616d7307a26b"
    "7610c391a6686f73743a3781a666616d696c79a56c6c616d61"
)
REPLICA_BEFORE = (
    "dc0014a77265706c69636101a7636f6d70757465a9636f6d707574652d31a4686f73747bcb3ff8000000000000a56d6f64656ccd1000cb3fd000000000000081a772756e6e69"
    "6e67cb400000000000000091a5616c696173a74c4f4144494e4781aa746f6f6c5f63616c6c73a66865726d6573a26670c381ab74656d7065726174757265cb3fe00000000000"
    "0091a54c4142454cc381a86e5f706172616d7307"
)
REPLICA = Golden(
    Replica(
        "compute",
        "compute-1",
        "host",
        123,
        1.5,
        "model",
        4096,
        0.25,
        Load(running=2.0),
        aliases=("alias",),
        problem="LOADING",
        parsers={"tool_calls": "hermes"},
        fingerprint="fp",
        is_encoder=True,
        sampling={"temperature": 0.5},
        labels=("LABEL",),
        is_multi_label=True,
        sizes={"n_params": 7},
        kv_fingerprint="kv",
        block_size=16,
        takes_images=True,
        ranks=("host:7",),
        weights={"family": "llama"},
    ),
    REPLICA_NOW,
    REPLICA_BEFORE,
    {"kv_fingerprint": "", "block_size": 0, "takes_images": False, "ranks": (), "weights": {}},
)

VIEW_NOW = (
    "99a47669657701a9636f6d707574652d31106407030291dc0011a57265712d31c3a973616d706c65722d31ff09080b030102049405020901cb3ff8000000000000cb40040000"
    "00000000cb400c000000000000cb401200000000000002"
)
VIEW_BEFORE = (
    "99a47669657701a9636f6d707574652d31106407030291dc0010a57265712d31c3a973616d706c65722d31ff09080b030102049405020901cb3ff8000000000000cb400400000000"
    "0000cb400c000000000000cb4012000000000000"
)
SEEN = SequenceView(
    "req-1",
    True,
    "sampler-1",
    -1,
    num_prompt_tokens=9,
    num_cached_tokens=8,
    num_computed_tokens=11,
    num_output_tokens=3,
    num_undecided_tokens=1,
    num_preemptions=2,
    num_blocks=4,
    block_runs=(5, 2, 9, 1),
    created_at=1.5,
    tokenized_at=2.5,
    taken_at=3.5,
    scheduled_at=4.5,
    num_accepted_tokens=2,
)
VIEW = Golden(
    ComputeView(
        "compute-1",
        block_size=16,
        num_blocks=100,
        num_held_blocks=7,
        num_cached_blocks=3,
        num_sequences=2,
        sequences=(SEEN,),
    ),
    VIEW_NOW,
    VIEW_BEFORE,
    {"sequences": (replace(SEEN, num_accepted_tokens=0),)},
)

GOLDEN: tuple[Golden, ...] = (
    GENERATE,
    TOKENIZED,
    CANDIDATES,
    DECISIONS,
    TOKEN,
    EVENTS,
    CONTROL,
    OFFER,
    ENCODE,
    REPLICA,
    VIEW,
)
