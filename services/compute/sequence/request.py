"""Request: what was asked of a sequence. It never changes."""

from dataclasses import dataclass, field

from shared.model.arrays import Array
from shared.model.dry_breakers import Breakers
from shared.model.sampling_params import SamplingParams
from shared.model.segments import PLAIN_LAYOUT, Layout, PlainLayout
from shared.model.vision.images import ImageRun
from shared.wire.messages import EmbeddingParams


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    handle: int  # unique in this process; names the sequence in StepCandidates
    request_id: str
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0  # smaller is more urgent
    arrived_at: float = 0.0  # s, on the scheduler's clock
    deadline: float | None = None  # on the same clock: a sequence that has not begun by then is dropped
    group_id: str | None = None  # sequences of one prompt (n > 1) share its blocks
    cache_salt: str = ""  # only sequences with the same salt share cached prefixes
    tenant_id: str = ""  # tenants share the places
    # where the prompt's tokens are; with segments, all numbers of tokens count slots, and HOLE is the
    # token of an empty slot
    layout: Layout | PlainLayout = PLAIN_LAYOUT
    # prompt tokens that stand for images: their ids are below 0, and name the image
    images: tuple[ImageRun, ...] = ()
    positions: Array | None = None  # of prompt tokens, where images have rows and columns: [3, n] int64
    position_shift: int = 0  # position less index, for a token behind the prompt
    sees_whole_images: bool = False  # an image's tokens see each other, and are computed together
    # set: the prompt is embedded, and no token is sampled
    embedding: EmbeddingParams | None = None
    dry_breakers: Breakers = field(default_factory=dict)  # no repetition that DRY penalizes reaches over one
    prediction: list[int] = field(default_factory=list)  # the output that the client expects

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end the sequence."""
        return (*self.eos_token_ids, *self.params.stop_token_ids)

    @property
    def is_plain(self) -> bool:
        """Whether the prompt is text, without segments and images."""
        return not self.layout.segments and not self.images

    @property
    def largest_whole(self) -> int:
        """How many tokens the largest image has, if an image's tokens are computed together."""
        return max((run.count for run in self.images), default=0) if self.sees_whole_images else 0

    def images_in(self, first: int, last: int) -> tuple[ImageRun, ...]:
        """The parts of images among the tokens [first, last), counted from `first`."""
        if not self.images:
            return ()
        return tuple(
            ImageRun(
                max(run.start - first, 0),
                min(run.end, last) - max(run.start, first),
                run.key,
                run.row + max(0, first - run.start),
            )
            for run in self.images
            if run.start < last and first < run.end
        )
