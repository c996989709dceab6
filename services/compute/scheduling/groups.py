"""Groups: the running sequences of one prompt, which share its blocks."""

from services.compute.sequence import Sequence


class Groups:
    def __init__(self) -> None:
        self._members: dict[str, dict[int, Sequence]] = {}  # what runs of each group, by handle

    def join(self, sequence: Sequence) -> None:
        if sequence.request.group_id is not None:
            self._members.setdefault(sequence.request.group_id, {})[sequence.handle] = sequence

    def leave(self, sequence: Sequence) -> None:
        if sequence.request.group_id is not None:
            members = self._members[sequence.request.group_id]
            del members[sequence.handle]
            if not members:
                del self._members[sequence.request.group_id]

    def twin(self, sequence: Sequence) -> Sequence | None:
        """A running sequence of the same prompt, if there is one; rather one whose prompt is
        computed. It has the logprobs that are asked of the prompt."""
        members = self._members.get(sequence.request.group_id, {}) if sequence.request.group_id is not None else {}
        able = [each for each in members.values() if sequence.is_scored or each.request.params.prompt_logprobs == sequence.request.params.prompt_logprobs]
        if not able:
            return None
        twin = max(able, key=lambda each: each.kv.num_computed >= each.tokens.num_prompt)
        num_prompt = sequence.tokens.num_prompt
        is_same = twin.tokens.ids[: twin.tokens.num_prompt] == sequence.tokens.ids[:num_prompt]
        is_same = is_same and twin.request.cache_salt == sequence.request.cache_salt and twin.request.layout == sequence.request.layout
        return twin if is_same else None
