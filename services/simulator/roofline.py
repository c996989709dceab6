"""Roofline: how long a step takes on one card, or on a group of them.

A rank multiplies, then attends, for each layer. Each kind of work takes the larger of the time for
its bytes and for its operations (Williams et al. 2009, "Roofline"). With tensor parallelism every
layer is cut by its outputs, and the outputs are gathered: attention's, its projection's, the MLP's
activations, and the MLP's. With pipeline parallelism a step's sequences are divided over as many
smaller steps as there are stages. These follow each other through the stages.

Steps without chunks of prompts are recorded, unless a layer is cut. The host launches all others kernel
by kernel: it may take longer than the card.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.compute.ranks.parallel.heads import divide_heads
from services.compute.ranks.parallel.share import UNIT, Share
from services.compute.sequence.batch import ScheduledBatch
from services.simulator.hardware import GATHER_LAUNCHES, LAYER_LAUNCHES, LINKS, Hardware, Link, Precision
from services.simulator.models import DecoderShape, Part, part_of
from shared.process.errors import StartupError

USABLE_SHARE, ACTIVATIONS = 0.94, 2e9  # of a card's memory, and bytes that are neither weights nor KV
HIDDEN_BYTES, LOGIT_BYTES = 2, 4  # of a number that ranks exchange


@dataclass(frozen=True, slots=True)
class Work:
    """A step in numbers."""

    num_tokens: float
    num_context_tokens: float  # whose KV is read
    num_pairs: float  # of a token and one that it sees
    num_sequences: float  # each is taken to have a row of logits

    @classmethod
    def of(cls, batch: ScheduledBatch) -> "Work":
        pairs = [pairs_of(row.num_tokens, row.num_context_tokens) for row in batch.rows]
        return cls(batch.num_tokens, batch.num_context_tokens, sum(pairs), len(batch.rows))

    def divided(self, count: float) -> "Work":
        return Work(
            self.num_tokens / count, self.num_context_tokens / count, self.num_pairs / count, self.num_sequences / count
        )


def pairs_of(num_tokens: int, num_context_tokens: int) -> int:
    """Pairs of the last num_tokens of a context with those that they see."""
    return num_tokens * num_context_tokens - num_tokens * (num_tokens - 1) // 2


@dataclass(frozen=True, slots=True)
class CardGroup:
    """The cards of a replica: `tensor` of them divide every layer, and `pipeline` times as many the
    layers."""

    tensor: int = 1
    pipeline: int = 1
    link: Link = LINKS["shared-memory"]  # between those that divide every layer
    stage_link: Link = LINKS["shared-memory"]  # between stages

    @property
    def num_cards(self) -> int:
        return self.tensor * self.pipeline


BF16, ONE_CARD = Precision(), CardGroup()


@dataclass(frozen=True, slots=True)
class Rank:
    """Seconds of a rank, by what a step has to do."""

    host_s: float
    launches_s: float  # the host's, in addition to the card's, of a step that is not recorded
    is_recordable: bool  # whether steps without chunks are
    latencies_s: float  # of gathers
    attention_weights_s: float  # reading them
    mlp_weights_s: float
    unchosen: float  # share of a mixture's experts that one token leaves out
    attention_token_s: float  # multiplying a token by them
    mlp_token_s: float
    head_weights_s: float
    head_row_s: float
    context_token_s: float  # reading its KV
    pair_s: float
    gather_token_s: float
    gather_row_s: float

    def seconds(self, work: Work) -> float:
        """Experts are taken to be chosen evenly: some of them by no token, and each rank's by its share of
        the tokens."""
        tokens, rows = work.num_tokens, work.num_sequences
        chosen: float = 1 - self.unchosen**tokens
        products = max(self.attention_weights_s, self.attention_token_s * tokens) + max(
            self.mlp_weights_s * chosen, self.mlp_token_s * tokens
        )
        head = max(self.head_weights_s, self.head_row_s * rows)
        attention = max(self.context_token_s * work.num_context_tokens, self.pair_s * work.num_pairs)
        card_s = (
            products + head + attention + self.latencies_s + self.gather_token_s * tokens + self.gather_row_s * rows
        )
        return self.host_s + (card_s if self.is_recordable and tokens <= rows else max(card_s, self.launches_s))


class Roofline:
    """Seconds of a model's steps. The rank that takes longest sets the pace of its stage."""

    def __init__(
        self, model: DecoderShape, hardware: Hardware, precision: Precision = BF16, group: CardGroup = ONE_CARD
    ) -> None:
        self.group = group
        self.stages = [make_ranks(model, hardware, precision, group, number) for number in range(group.pipeline)]
        self.hidden_bytes = HIDDEN_BYTES * model.hidden_size

    def seconds(self, work: Work) -> float:
        """Until each of the step's sequences has its token."""
        if len(self.stages) == 1:
            return longest(self.stages[0], work)
        count = min(len(self.stages), work.num_sequences)
        part = work.divided(count)
        stages = [longest(ranks, part) for ranks in self.stages]
        return max(sum(stages) + self.passing_seconds(part), count * max(stages))

    def passing_seconds(self, work: Work) -> float:
        """Hidden states go from stage to stage, and those that become logits back to the first."""
        num_states = (len(self.stages) - 1) * work.num_tokens + work.num_sequences
        return (
            len(self.stages) * self.group.stage_link.latency_s(2)
            + num_states * self.hidden_bytes * self.group.stage_link.byte_s
        )


def longest(ranks: Sequence[Rank], work: Work) -> float:
    return max([rank.seconds(work) for rank in ranks])


def make_ranks(
    model: DecoderShape, hardware: Hardware, precision: Precision, group: CardGroup, number: int
) -> list[Rank]:
    """The ranks of the stage of that number; of those that take as long as each other, one."""
    parts = [part_of(model, Share(rank, group.tensor), Share(number, group.pipeline)) for rank in range(group.tensor)]
    return list(dict.fromkeys(make_rank(model, hardware, precision, group, number, part) for part in parts))


def make_rank(
    model: DecoderShape, hardware: Hardware, precision: Precision, group: CardGroup, number: int, part: Part
) -> Rank:
    bandwidth, rate = hardware.bandwidth_share * hardware.bandwidth, hardware.flops_share * hardware.flops
    multiply_s = 2 / (hardware.flops_share * (hardware.int8_ops if precision.has_int8_products else hardware.flops))
    layers, active = part.num_layers, model.num_active / model.num_experts
    num_gathers, token_s, row_s = (
        gathers(model, part, group, is_first=number == 0) if group.tensor > 1 else (0, 0.0, 0.0)
    )
    return Rank(
        host_s=hardware.host_s if number == 0 else 0.0,
        launches_s=(layers * LAYER_LAUNCHES + num_gathers * GATHER_LAUNCHES) * hardware.launch_s,
        is_recordable=group.tensor == 1,
        latencies_s=num_gathers * group.link.latency_s(group.tensor),
        attention_weights_s=layers * part.attention_weights * precision.weight_bytes / bandwidth,
        mlp_weights_s=layers * part.mlp_weights * precision.weight_bytes / bandwidth,
        unchosen=1 - active,
        attention_token_s=layers * part.attention_weights * multiply_s,
        mlp_token_s=layers * part.mlp_weights * active * multiply_s,
        head_weights_s=part.head_weights * precision.head_bytes / bandwidth,
        head_row_s=part.head_weights * multiply_s,
        context_token_s=kv_bytes_per_token(model, part, precision) / bandwidth,
        pair_s=4 * layers * part.num_heads * model.head_dim / rate,
        gather_token_s=token_s,
        gather_row_s=row_s,
    )


def gathers(model: DecoderShape, part: Part, group: CardGroup, *, is_first: bool) -> tuple[int, float, float]:
    """Their number, seconds for each token, and for each row of logits, which the first stage gathers."""
    ranks = Share(0, group.tensor)
    of_ranks = divide_heads(model.num_heads, model.num_kv_heads, group.tensor)
    heads = (model.num_heads - min(len(each.queries) for each in of_ranks)) * model.head_dim
    hidden = received(ranks, model.hidden_size)
    if model.num_experts > 1:  # each token's experts are gathered, then added
        mlp, count = model.num_active * model.hidden_size * received(ranks, model.num_experts, 1) / model.num_experts, 3
    else:
        mlp, count = received(ranks, model.intermediate_size) + hidden, 4
    columns = part.num_layers * (heads + hidden + mlp) + model.hidden_size  # at first all get the hidden states
    num_gathers = part.num_layers * count + 1 + is_first
    logits = received(ranks, model.vocab_size) if is_first else 0
    byte_s = group.link.byte_s
    return num_gathers, HIDDEN_BYTES * columns * byte_s, LOGIT_BYTES * logits * byte_s


def received(ranks: Share, n: int, unit: int = UNIT) -> int:
    """The columns, out of n, that the rank with the fewest gets from others."""
    return n - min(len(part) for part in ranks.parts(n, unit))


def kv_bytes_per_token(model: DecoderShape, part: Part, precision: Precision) -> float:
    return 2 * part.num_layers * part.num_kv_heads * model.head_dim * precision.kv_bytes


def weight_bytes(part: Part, precision: Precision) -> float:
    """Memory of a rank's weights."""
    layers = part.num_layers * (part.attention_weights + part.mlp_weights)
    return layers * precision.weight_bytes + part.head_weights * precision.head_bytes + part.embedding_weights * 2.0


def kv_tokens(model: DecoderShape, hardware: Hardware, precision: Precision = BF16, group: CardGroup = ONE_CARD) -> int:
    """Tokens whose KV fits on each card, in addition to the weights. Raises StartupError if there is no room, or a
    stage without a layer."""
    if group.pipeline > model.num_layers:
        raise StartupError(
            f"--pipeline-parallel-size {group.pipeline}: the model has {model.num_layers} layers, and each stage "
            "needs one"
        )
    fitting: list[int] = []
    for number in range(group.num_cards):
        part = part_of(model, Share(number % group.tensor, group.tensor), Share(number // group.tensor, group.pipeline))
        weights, per_token = weight_bytes(part, precision), kv_bytes_per_token(model, part, precision)
        left = hardware.memory * USABLE_SHARE - weights - ACTIVATIONS
        if left < per_token:
            raise StartupError(
                f"--model: its weights take {weights / 1e9:.0f} GB of a card, which has {hardware.memory / 1e9:.0f}"
            )
        if per_token:
            fitting.append(int(left // per_token))
    return min(fitting)
