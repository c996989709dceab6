"""Text to token ids, for a batch of requests at once, and the checks that need the vocabulary or
the length."""

from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct, structs
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from services.tokenizer.answers import TokenizerAnswer, describe, detokenized, rendered_prompt, tokenized
from services.tokenizer.chat_template import SLOW, ChatTemplate, Slow
from services.tokenizer.modules import LONG_TEXT, PARAM, join, with_place
from services.tokenizer.pending import PendingPrompt, alone, check_images, check_places, expand_images, head_of
from services.tokenizer.special_tokens import MARK, MarkedText, SpecialTokens
from services.tokenizer.template_features import opened_thought
from shared.model.arrays import Array, Int32Array
from shared.model.context_length import context_exceeded, context_far_exceeded
from shared.model.dry_breakers import pack_breakers
from shared.model.files import ModelFiles
from shared.model.sampling_params import MAX_PROMPT_LOGPROBS, SamplingParams
from shared.model.segments import Segment, length_of
from shared.model.token_table import TokenTable
from shared.process.errors import Invalid
from shared.process.telemetry import get_logger
from shared.wire.messages import ChatMessage, ChatOptions, GenerateRequest, TokenizedRequest

log = get_logger("penstock.tokenizer")

T = TypeVar("T")

MAX_PACKED = 1 << 18  # numbers of one request's breakers: 1 MB in its message
MAX_TAIL = 20  # tokens after the first
KEPT = 256  # breakers that are remembered


class TemplateInput(Struct, frozen=True):
    """The input of a chat template."""

    messages: tuple[ChatMessage, ...]
    options: ChatOptions


def field_of(request: GenerateRequest) -> str:
    """The field in which the client wrote what is encoded."""
    return "messages" if request.messages is not None else "input" if request.embedding is not None else "prompt"


class Encoder:
    """A transformers fast tokenizer and what its model allows."""

    def __init__(
        self, tokenizer: Any, files: ModelFiles, *, tool_call_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = ChatTemplate(tokenizer, is_quick=True)
        self.parsers = self.chat_template.parsers(tool_call_parser, reasoning_parser)
        self.special_tokens = SpecialTokens(tokenizer.backend_tokenizer)
        self.breakers = BreakerTable(tokenizer.backend_tokenizer)
        self.model = files.name
        self.vocab_size = files.vocab_size
        if (largest := max(tokenizer.get_vocab().values(), default=0)) >= self.vocab_size:
            log.warning(
                "the tokenizer has tokens outside the model's vocabulary: texts that need them are refused",
                file=files.file("tokenizer.json"),
                largest_id=largest,
                vocab_size=self.vocab_size,
            )
        self.eos_token_ids = files.eos_token_ids
        self.can_shorten = files.can_shorten
        self.vision, self.max_model_len = files.vision, files.max_model_len
        self.image_token_id = (
            tokenizer.convert_tokens_to_ids(files.vision.placeholder) if files.vision is not None else 0
        )

    def encode(
        self, requests: list[GenerateRequest], max_model_len: int
    ) -> list[TokenizedRequest | TokenizerAnswer | Invalid]:
        """Encode requests: for each its tokens, or what else it asked for, or why there is
        neither."""
        prepared = self.prepare(requests, self.chat_template)
        for each in prepared:
            if each.is_slow:
                each.error = Invalid(
                    "the model's chat template takes too long", param="messages", code="chat_template_error"
                )
        return self.finish(prepared, max_model_len)

    def prepare(self, requests: list[GenerateRequest], chat_template: ChatTemplate) -> list[PendingPrompt]:
        """The requests with the texts to encode, marked where special tokens are spelt in them that
        are to be text. Safe in threads, each with a ChatTemplate of its own."""
        prepared = [PendingPrompt.of(request) for request in requests]
        chats: list[tuple[PendingPrompt, TemplateInput]] = []
        for each in prepared:
            with alone(each):
                each.request = with_place(each.request)
                check_images(each.request.messages, self.vision, has_modules=bool(each.request.modules))
                if each.request.messages is not None:
                    chats.append(
                        (each, self._marked(each.request, TemplateInput(each.request.messages, each.request.chat)))
                    )
                elif (marked := self._marked(each.request, each.text)) is not None and marked != each.text:
                    each.text = MarkedText(marked)
        rendered = chat_template.render([chat.messages for _, chat in chats], [chat.options for _, chat in chats])
        for (each, chat), text in zip(chats, rendered, strict=True):
            with alone(each):
                is_marked = chat.messages is not each.request.messages
                each.take(
                    self._with_own_marks(chat, text, chat_template) if is_marked and isinstance(text, str) else text
                )
                expand_images(each, self.vision, self.max_model_len)
        return prepared

    def finish(
        self, prepared: list[PendingPrompt], max_model_len: int
    ) -> list[TokenizedRequest | TokenizerAnswer | Invalid]:
        """Encode requests that `prepare` has returned. Returns what `encode` does."""
        heads = [head_of(each) for each in prepared]  # before the modules
        for each in (*prepared, *heads):
            if each is not None and each.error is None and each.text is not None:
                with alone(each):
                    self._bound(each, each.text, max_model_len)
        self._encode_texts(
            [each for each in (*prepared, *heads) if each is not None and each.error is None and each.text is not None],
            max_model_len,
        )
        for each, head in zip(prepared, heads, strict=True):
            if each.error is None and each.request.modules:
                with alone(each):
                    self._place_modules(each, head)
        return [self._finish(each, max_model_len) for each in prepared]

    def _marked(self, request: GenerateRequest, value: T) -> T:
        """A prompt or a conversation, with marks if it needs them. Raises Invalid if it can't have
        them."""
        is_chat, parses = request.messages is not None, request.encoding.parse_special_tokens
        if not is_chat if parses is None else parses:
            return value
        try:
            return self.special_tokens.mark(value) if self.special_tokens.are_spelled_in(value) else value
        except Invalid as error:
            raise Invalid(str(error), param="messages" if is_chat else "prompt") from None

    def _with_own_marks(self, chat: TemplateInput, text: str, chat_template: ChatTemplate) -> str | Invalid | Slow:
        """The rendered text of a conversation with marks. If they have changed what the template
        does, it looks for special tokens in contents: it may in the assistant's
        answers and thoughts, where the model wrote them; in other messages and in calls they stay
        text."""
        unmarked = self.special_tokens.unmark(chat)
        assistants = tuple(
            structs.replace(plain, tool_calls=each.tool_calls) if plain.role == "assistant" else each
            for plain, each in zip(unmarked.messages, chat.messages, strict=True)
        )
        plain, again = chat_template.render([unmarked.messages, assistants], [unmarked.options, chat.options])
        if not isinstance(again, str):
            return again
        if isinstance(plain, Slow):
            return SLOW
        return MarkedText(text if text.replace(MARK, "") == plain else again)

    def _bound(self, prepared: PendingPrompt, text: str, max_model_len: int) -> None:
        """Cut or refuse a text that can't fit. Megabytes take a tokenizer seconds, and other
        requests wait: of a long text a part is encoded, and where that is more than the model
        reads, by more than the tokens of a word that is cut, the rest is not."""
        request, longest = prepared.request, LONG_TEXT * max_model_len
        encoding = request.encoding
        if len(text) <= longest or request.task != "generate":
            return
        cuts = encoding.truncate_prompt_tokens is not None
        if cuts and not encoding.keeps_beginning:
            return
        try:
            [ids] = self._encode_batch([text[:longest]], "prompt", add_special_tokens=False)
        except Invalid:
            return
        if len(ids) <= max_model_len + max_model_len // 8:
            return
        if cuts:
            prepared.text = type(text)(text[:longest])
            return
        prepared.error = context_far_exceeded(field_of(request), max_model_len, len(ids))

    def _encode_texts(self, prepared: list[PendingPrompt], max_model_len: int) -> None:
        """Encode with one batched call for the templated texts, which bring their own special
        tokens, and one for plain prompts."""

        def kind(each: PendingPrompt) -> tuple[bool, bool]:
            """Whether it is a conversation, and whether special tokens are added."""
            added, is_chat = each.request.encoding.add_special_tokens, each.request.messages is not None
            return is_chat, not is_chat if added is None else added

        for (is_chat, adds), group in groupby(sorted(prepared, key=kind), key=kind):
            param, plain = "messages" if is_chat else "prompt", list[PendingPrompt]()
            for each in group:
                if isinstance(each.text, MarkedText):
                    self._encode_marked(each, each.text, param, add_special_tokens=adds)
                elif each.request.pair is not None:
                    self._encode_pair(each, max_model_len, adds_special_tokens=adds)
                else:
                    plain.append(each)
            if plain:
                self._encode_plain(plain, param, add_special_tokens=adds)

    def _encode_plain(self, prepared: list[PendingPrompt], param: str, *, add_special_tokens: bool) -> None:
        """Encode all at once; if that fails, each alone, so that a text that can't be encoded fails
        by itself."""
        try:
            token_ids = self._encode_batch(
                [str(each.text) for each in prepared], param, add_special_tokens=add_special_tokens
            )
            for each, ids in zip(prepared, token_ids, strict=True):
                each.token_ids = ids
        except Invalid as error:
            if len(prepared) == 1:
                prepared[0].error = error
                return
            for each in prepared:
                self._encode_plain([each], param, add_special_tokens=add_special_tokens)

    def _encode_pair(self, prepared: PendingPrompt, max_model_len: int, *, adds_special_tokens: bool) -> None:
        """Both texts as the tokenizer joins them. Of a pair that is too long the longer one is cut,
        if the request wants that."""
        request = prepared.request
        max_tokens = request.encoding.truncate_prompt_tokens
        cut = (
            {"truncation": "longest_first", "max_length": max_tokens if max_tokens > 0 else max_model_len}
            if max_tokens is not None
            else {}
        )
        try:
            encoded = self.tokenizer(
                prepared.text, request.pair, add_special_tokens=adds_special_tokens, verbose=False, **cut
            )["input_ids"]
            prepared.token_ids = np.asarray(encoded, np.int32)
        except Exception as error:  # a tokenizer raises what it likes
            prepared.error = Invalid(f"the texts can't be encoded: {error}", param="input")
        finally:
            self.tokenizer.backend_tokenizer.no_truncation()  # else it cuts what others encode next

    def _encode_marked(
        self, prepared: PendingPrompt, text: MarkedText, param: str, *, add_special_tokens: bool
    ) -> None:
        try:
            prepared.token_ids = np.asarray(
                self.special_tokens.encode(text, add_special_tokens=add_special_tokens), np.int32
            )
        except Exception as error:  # a tokenizer raises what it likes
            prepared.error = Invalid(
                str(error) if isinstance(error, Invalid) else f"the text can't be encoded: {error}", param=param
            )

    def _encode_batch(self, texts: list[str], param: str, *, add_special_tokens: bool) -> list[Array]:
        """The token ids of texts, in one call. Raises Invalid if one of them can't be encoded."""
        try:
            encoded = self.tokenizer(texts, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        except Exception as error:  # a tokenizer raises what it likes
            raise Invalid(f"the text can't be encoded: {error}", param=param) from None
        return [np.asarray(ids, np.int32) for ids in encoded]

    def _finish(self, prepared: PendingPrompt, max_model_len: int) -> TokenizedRequest | TokenizerAnswer | Invalid:
        if prepared.error is None:
            with alone(prepared):
                return self._finished(prepared, prepared.request, prepared.text, prepared.token_ids, max_model_len)
        assert prepared.error is not None
        return prepared.error

    def _place_modules(self, prepared: PendingPrompt, head: PendingPrompt | None) -> None:
        """Put the request's modules between the tokens before and behind them. head: of a
        conversation, what stands before; before a plain prompt's modules stands a BOS or nothing.
        Raises Invalid."""
        token_ids = prepared.token_ids
        if head is not None and head.error is not None:
            raise head.error
        count = len(self.beginning) if token_ids[: len(self.beginning)].tolist() == self.beginning.tolist() else 0
        before, behind = (token_ids[:count], token_ids[count:]) if head is None else (head.token_ids, token_ids)
        prepared.token_ids, prepared.segments = join(prepared.request, before, behind, self._encode_as_text)

    def _encode_as_text(self, text: str) -> Array:
        """A text's tokens; special tokens that are spelt in it are text. Raises Invalid."""
        prepared = PendingPrompt(GenerateRequest("", None, "", SamplingParams()), text)
        if self.special_tokens.are_spelled_in(text):
            self._encode_marked(prepared, MarkedText(self.special_tokens.mark(text)), PARAM, add_special_tokens=False)
        else:
            self._encode_plain([prepared], PARAM, add_special_tokens=False)
        if prepared.error is not None:
            raise prepared.error
        return prepared.token_ids

    def _finished(
        self, prepared: PendingPrompt, request: GenerateRequest, text: str | None, token_ids: Array, max_model_len: int
    ) -> TokenizedRequest | TokenizerAnswer:
        """The request with its tokens, or the answer to it. Raises Invalid."""
        opening = self._opening(request, text)
        if request.task != "generate":
            return self._answer(request, text, token_ids, max_model_len, opening)
        kept = self._truncated(request, token_ids, max_model_len)
        if len(kept) < len(token_ids) or isinstance(text, MarkedText):
            text, token_ids = None, kept
        check_places(token_ids, prepared.images, self.image_token_id)
        params = request.params
        max_tokens = self._check(request, token_ids, prepared.segments, max_model_len)
        bad_words = self._spell_bad_words(params.bad_words)
        echo_text = (text if text is not None else self._decode(token_ids)) if request.echo else opening
        wants_offsets = request.echo and params.prompt_logprobs is not None
        return TokenizedRequest(
            request_id=request.request_id,
            gateway_id=request.gateway_id,
            model=request.model,
            params=structs.replace(params, max_tokens=max_tokens, bad_words_token_ids=bad_words),
            prompt_token_ids=token_ids,
            # a grammar has its own end
            eos_token_ids=() if params.ignore_eos and request.constraint is None else self.eos_token_ids,
            echo_text=echo_text,
            created_at=request.created_at,
            scheduling=request.scheduling,
            echo_offsets=offsets_of(self.tokenizer, request, text, token_ids)
            if wants_offsets
            else np.zeros(0, np.int32),
            constraint=request.constraint
            if opening is None or request.constraint is None
            else structs.replace(request.constraint, thought_begin=""),
            dry_breakers=self.breakers.pack(params.dry.sequence_breakers)
            if params.dry is not None
            else np.zeros(0, np.int32),
            embedding=request.embedding,
            traceparent=request.traceparent,
            prediction_token_ids=self._prediction(request, max_model_len),
            segments=prepared.segments,
            images=prepared.images,
            image_token_id=self.image_token_id if prepared.images else 0,
        )

    def _prediction(self, request: GenerateRequest, max_model_len: int) -> Array:
        """The expected answer's tokens, as far as an answer can be long. Raises Invalid."""
        if not request.prediction:
            return np.zeros(0, np.int32)
        [token_ids] = self._encode_batch(
            [request.prediction[: LONG_TEXT * max_model_len]], "prediction", add_special_tokens=False
        )
        return token_ids[:max_model_len]

    def _spell_bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word as it stands at a beginning, and after a space."""
        texts = [text for word in words for text in (word.lstrip(), f" {word.lstrip()}") if text.strip()]
        try:
            spelt = self._encode_batch(texts, "bad_words", add_special_tokens=False) if texts else []
        except Invalid:
            spelt = []
        if len(spelt) < 2 * len(words) or not all(map(len, spelt)):
            raise Invalid("bad_words holds a text that has no tokens", param="bad_words")
        return tuple(dict.fromkeys(tuple(mark.tolist()) for mark in spelt))

    def _opening(self, request: GenerateRequest, text: str | None) -> str | None:
        """The part of the answer that the template has said, as far as its reader must know it. An
        answer that has to match from its first token on starts over."""
        if (
            request.messages is None
            or text is None
            or (request.constraint is not None and not request.constraint.thought_end)
        ):
            return None
        return opened_thought(text, self.parsers.get("reasoning", ""), request.chat) or None

    def _answer(
        self, request: GenerateRequest, text: str | None, token_ids: Array, max_model_len: int, opening: str | None
    ) -> TokenizerAnswer:
        """Answer a request that asks for no generation. Raises Invalid."""
        if request.task == "render":
            return rendered_prompt((text or "").replace(MARK, ""))
        if request.task == "tokenize":
            kept = self._truncated(request, token_ids, max_model_len).tolist()
            is_spelt = request.encoding.return_token_strs
            strs = self.tokenizer.convert_ids_to_tokens(kept) if is_spelt else None
            pieces = [self.token_table.bytes_of(each) for each in kept] if is_spelt else None
            return tokenized(kept, max_model_len, self.eos_token_ids, opening or "", token_strs=strs, pieces=pieces)
        if request.task == "detokenize":
            self._check_ids(request, token_ids)
            return detokenized(self._decode(token_ids, skips_special=request.params.skip_special_tokens))
        return describe(self.tokenizer, self.model, max_model_len, self.eos_token_ids)

    def _truncated(self, request: GenerateRequest, token_ids: Array, max_model_len: int) -> Array:
        """The last tokens of the prompt, or the first, as many as the request wants of it."""
        max_tokens = request.encoding.truncate_prompt_tokens
        if max_tokens is None:
            return token_ids
        if max_tokens < 0:
            wanted = 1 if request.params.max_tokens is None else request.params.max_tokens
            max_tokens = max(1, max_model_len - (wanted if wanted < max_model_len else 1))
        if not request.encoding.keeps_beginning or max_tokens >= len(token_ids):
            return token_ids[-max_tokens:]
        ending = (
            self.ending
            if token_ids[len(token_ids) - len(self.ending) :].tolist() == self.ending.tolist()
            else self.ending[:0]
        )
        return np.concatenate((token_ids[: max(0, max_tokens - len(ending))], ending[:max_tokens]))

    @cached_property
    def token_table(self) -> TokenTable:
        return TokenTable(self.tokenizer.backend_tokenizer)

    @cached_property
    def ending(self) -> Array:
        """The special tokens that the tokenizer puts at every text's end, such as [SEP]."""
        return self._shared_by_texts(-1)[::-1]

    @cached_property
    def beginning(self) -> Array:
        """The special tokens that it puts at every text's beginning, such as a BOS."""
        return self._shared_by_texts(1)

    def _shared_by_texts(self, step: int) -> Array:
        """The tokens that an empty text and another have in common, from the beginning on, or from
        the end."""
        try:
            empty, word = (each[::step] for each in self._encode_batch(["", "a"], "input", add_special_tokens=True))
        except Invalid:
            return np.zeros(0, np.int32)
        num_shared = next(
            (count for count, pair in enumerate(zip(empty, word, strict=False)) if pair[0] != pair[1]), len(empty)
        )
        return empty[:num_shared]

    def _decode(self, token_ids: Array, *, skips_special: bool = False) -> str:
        try:
            return str(self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=skips_special))
        except Exception as error:
            raise Invalid(f"the tokens can't be made text: {error}", param="prompt") from None

    def _check(
        self, request: GenerateRequest, token_ids: Array, segments: tuple[Segment, ...], max_model_len: int
    ) -> int:
        """The request's max_tokens, cut to what the prompt leaves of the model's length: an answer
        that gets there ends with `length`.

        Many agents always ask for more than a small model has. Raises Invalid for a prompt that
        leaves no room at all.
        """
        params, n, field = request.params, len(token_ids), field_of(request)
        if n == 0:
            raise Invalid("the prompt is empty: it has no tokens", param=field)
        self._check_ids(request, token_ids)
        for name, ids in (
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids),
        ):
            if any(token >= self.vocab_size for token in ids):
                raise Invalid(f"{name} names a token outside the vocabulary, [0, {self.vocab_size})", param=name)
        if params.prompt_logprobs is not None and (n - 1) * (1 + params.prompt_logprobs) > MAX_PROMPT_LOGPROBS:
            reason = (
                f"the prompt has {n} tokens, and a request takes at most {MAX_PROMPT_LOGPROBS} logprobs of its "
                "prompt: ask for fewer of each token"
            )
            raise Invalid(reason, param="prompt_logprobs")
        dimensions = request.embedding.dimensions if request.embedding is not None else None
        if dimensions is not None and not self.can_shorten(dimensions):
            raise Invalid(
                f"this model's embeddings can't be cut to {dimensions} dimensions: it was not trained for that",
                param="dimensions",
            )
        length = length_of(segments) if segments else n
        num_left = max_model_len - length
        if (min_room := 0 if params.max_tokens == 0 else 1) > num_left:
            raise context_exceeded(
                PARAM if segments and segments[-1].num_tokens + min_room <= max_model_len else field,
                max_model_len,
                length,
                min_room,
            )
        if params.min_tokens > (
            max_tokens := num_left if params.max_tokens is None else min(params.max_tokens, num_left)
        ):
            raise Invalid(f"min_tokens is {params.min_tokens}, but at most {max_tokens} fit", param="min_tokens")
        return max_tokens

    def _check_ids(self, request: GenerateRequest, token_ids: Array) -> None:
        """Raises Invalid for token ids that no token has: the client's, or the tokenizer's."""
        if len(token_ids) and not (int(token_ids.min()) >= 0 and int(token_ids.max()) < self.vocab_size):
            if request.prompt_token_ids is None:
                raise Invalid(
                    f"the tokenizer of {self.model} makes token {int(token_ids.max())} of this text, and the model's "
                    f"vocabulary is [0, {self.vocab_size}): its tokenizer.json does not fit its config.json",
                    code="model_not_supported",
                )
            name = "tokens" if request.task == "detokenize" else "input" if request.embedding is not None else "prompt"
            raise Invalid(f"{name} holds token ids outside the vocabulary, [0, {self.vocab_size})", param=name)


class BreakerTable:
    """Looks through the whole vocabulary for a breaker that it has not seen; nothing is made before
    the first request that wants it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._find = lru_cache(KEPT)(self._search)

    def pack(self, breakers: tuple[str, ...]) -> Int32Array:
        """Raises Invalid for breakers that too many tokens hold."""
        token_lists = dict.fromkeys(tokens for breaker in breakers for tokens in self._find(breaker))
        packed = pack_breakers(token_lists)
        if len(packed) > MAX_PACKED:
            raise Invalid(
                f"dry_sequence_breakers are in {len(token_lists)} tokens of this vocabulary, which are too many",
                param="dry_sequence_breakers",
            )
        return packed

    @cached_property
    def _words(self) -> list[str]:
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return self._tokenizer.decode_batch([[token_id] for token_id in range(size)], skip_special_tokens=False)

    def _search(self, breaker: str) -> tuple[tuple[int, ...], ...]:
        tails = [self._tail(breaker[length:]) for length in range(1, len(breaker))]
        token_lists: list[tuple[int, ...]] = []
        for token_id, word in enumerate(self._words):
            if breaker in word:
                token_lists.append((token_id,))
            else:
                token_lists += [
                    (token_id, *tails[length - 1])
                    for length in range(1, len(breaker))
                    if word.endswith(breaker[:length])
                ]
        return tuple(token_lists)

    def _tail(self, rest: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(rest, add_special_tokens=False).ids[:MAX_TAIL])


def offsets_of(tokenizer: Any, request: GenerateRequest, text: str | None, token_ids: Array) -> Array:
    """The offset of each token in the text that is echoed; None: the text is decoded. What the
    text lacks, as a BOS, begins where the next one does."""
    if text is None:
        return decoded_offsets(tokenizer, token_ids.tolist())
    offsets, end, adds = [], 0, request.encoding.add_special_tokens is not False
    for begin, own_end in tokenizer(text, add_special_tokens=adds, return_offsets_mapping=True, verbose=False)[
        "offset_mapping"
    ]:
        # less than the end: a part of a character; more: of some, spaces are cut off
        offsets.append(end if begin == own_end else min(begin, end))
        end = max(end, own_end)
    return np.array(offsets, np.int32)


def decoded_offsets(tokenizer: Any, token_ids: list[int]) -> Array:
    """Offsets of the tokens in their text, special ones included."""
    stream, offsets, end = DecodeStream(skip_special_tokens=False), [], 0
    for token_id in token_ids:
        offsets.append(end)
        try:
            end += len(stream.step(tokenizer.backend_tokenizer, token_id) or "")
        except Exception as error:  # bare, from Rust
            raise Invalid(f"the prompt's tokens can't be made text one by one: {error}", param="prompt") from None
    return np.array(offsets, np.int32)
