"""Groups: the running sequences of one prompt, which share its blocks."""

from services.compute.sequence import Sequence


class Groups:
    def __init__(self) -> None:
        self._members: dict[str, dict[int, Sequence]] = {}  # what runs of each group, by handle

    def join(self, sequence: Sequence) -> None:
        if sequence.group_id is not None:
            self._members.setdefault(sequence.group_id, {})[sequence.handle] = sequence

    def leave(self, sequence: Sequence) -> None:
        if sequence.group_id is not None:
            members = self._members[sequence.group_id]
            del members[sequence.handle]
            if not members:
                del self._members[sequence.group_id]

    def twin(self, sequence: Sequence) -> Sequence | None:
        """A running sequence of the same prompt, if there is one; rather one whose prompt is
        computed. It has the logprobs that are asked of the prompt."""
        members = self._members.get(sequence.group_id, {}) if sequence.group_id is not None else {}
        able = [each for each in members.values() if sequence.is_scored or each.params.prompt_logprobs == sequence.params.prompt_logprobs]
        if not able:
            return None
        twin = max(able, key=lambda each: each.num_computed_tokens >= each.num_prompt_tokens)
        num_prompt = sequence.num_prompt_tokens
        is_same = twin.token_ids[: twin.num_prompt_tokens] == sequence.token_ids[:num_prompt]
        is_same = is_same and twin.cache_salt == sequence.cache_salt and twin.layout == sequence.layout
        return twin if is_same else None
