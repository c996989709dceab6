"""Affinity: which compute replica has a prompt's prefix, and how long it is worth waiting for it.

The tokenizer has the tokens, hence the names of the blocks that the prompt will fill; compute
replicas say which of those are in their prefix caches. It is a hint only: a prompt that goes
elsewhere gets the same bytes, later.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared.model.prefix_hash import prefix_hashes, prefix_root
from shared.wire.line import Pipeline
from shared.wire.messages import TokenizedRequest
from shared.wire.replica import Replica
from shared.wire.stage import Stage
from shared.wire.streams import prefixes_key

NAME_BYTES = 8  # of a hash, as replicas tell it
MAX_ASKED = 32  # blocks of a prompt: evenly spaced, the last among them
WORTH_S = 0.002  # that a prefix saves, at least
MOST_WAIT_S = 2.0
SLACK = 4  # sequences that a replica may have more than half as many again as the one with the fewest


@dataclass(frozen=True, slots=True)
class Choice:
    compute_id: str
    wait_s: float  # what the prefix saves: after so long anybody else is as good


@dataclass(frozen=True, slots=True)
class Question:
    """Whether a replica has some of a prompt's blocks."""

    prompt: int
    replica: Replica
    names: list[bytes]
    num_tokens: list[int]  # up to the end of each of these blocks


class Affinity:
    """Chooses for one model's prompts. Prompts that it has sent since the replicas said how many
    they have count as theirs."""

    def __init__(self, stage: Stage, model: str) -> None:
        self.stage = stage
        self.model = model
        self._sent: Counter[str] = Counter()
        self._sent_since = 0.0

    def choose(self, prompts: Sequence[TokenizedRequest]) -> list[Choice | None]:
        """The replica of each prompt. None: whoever comes first. One round trip, if there are several
        replicas."""
        registry = self.stage.registry
        replicas = [each for each in registry.of("compute", self.model) if each.block_size and each.load.max_num_seqs]
        if len(replicas) < 2 or not prompts:
            return [None] * len(prompts)
        if registry.looked_at != self._sent_since:
            self._sent_since = registry.looked_at
            self._sent.clear()
        questions = [question for number, prompt in enumerate(prompts) for question in ask_of(number, prompt, replicas)]

        def ask(pipe: Pipeline) -> None:
            for each in questions:
                pipe.execute_command("SMISMEMBER", prefixes_key(each.replica.replica_id), *each.names)

        replies: list[Any] = self.stage.transport.run(ask) if questions else []
        found: dict[int, list[tuple[Replica, int]]] = {}
        for question, reply in zip(questions, replies, strict=True):
            longest = max((count for count, is_there in zip(question.num_tokens, reply, strict=True) if is_there), default=0)
            found.setdefault(question.prompt, []).append((question.replica, longest))
        return [self._best(found.get(number, [])) for number in range(len(prompts))]

    def _best(self, found: list[tuple[Replica, int]]) -> Choice | None:
        """The replica that saves most, of those with a free place and not much more to do than others.
        found: all, with the tokens that each has of the prompt."""
        limit = SLACK + 1.5 * min((self._num_sequences(replica) for replica, _ in found), default=0)
        saved = {
            replica.replica_id: num_tokens * (replica.load.step_cost_per_token_s or 0.0)
            for replica, num_tokens in found
            if self._num_sequences(replica) < min(limit, replica.load.max_num_seqs or 0)
        }
        best = max(saved, key=lambda replica_id: (saved[replica_id], -self._sent[replica_id]), default=None)
        if best is None or saved[best] < WORTH_S:
            return None
        self._sent[best] += 1
        return Choice(best, min(saved[best], MOST_WAIT_S))

    def _num_sequences(self, replica: Replica) -> float:
        return (replica.load.running or 0) + (replica.load.waiting or 0) + self._sent[replica.replica_id]


def ask_of(number: int, prompt: TokenizedRequest, replicas: list[Replica]) -> list[Question]:
    """Questions about a prompt: its last token is computed anyway. Replicas with equal fingerprints
    have the same names for its blocks."""
    questions = []
    named: dict[tuple[str, int], list[bytes]] = {}
    token_ids = prompt.prompt_token_ids[:-1].tolist()
    for replica in replicas:
        size = replica.block_size
        if (kind := (replica.kv_fingerprint, size)) not in named:
            named[kind] = prefix_hashes(prefix_root(replica.kv_fingerprint, salt=prompt.scheduling.cache_salt), token_ids, size)
        hashes = named[kind]
        if not hashes:
            continue
        step = -(-len(hashes) // MAX_ASKED)
        asked = range(len(hashes) - 1, -1, -step)
        questions.append(Question(number, replica, [hashes[each][:NAME_BYTES] for each in asked], [(each + 1) * size for each in asked]))
    return questions
