"""Text to token ids, for a batch of requests at once, and the checks that need the vocabulary or the length."""

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
from tokenizers.decoders import DecodeStream

from services.tokenizer.answers import Answer, describe, detokenized, rendered_prompt, tokenized
from services.tokenizer.breakers import BreakerTable
from services.tokenizer.chat_template import SLOW, ChatTemplate, Slow
from services.tokenizer.special_tokens import MARK, MarkedText, SpecialTokens
from services.tokenizer.template_features import opened_thought
from shared.model.context_length import context_exceeded, context_far_exceeded
from shared.model.files import ModelFiles
from shared.model.sampling_params import MAX_PROMPT_LOGPROBS
from shared.process.errors import Invalid
from shared.wire.messages import ChatMessage, ChatOptions, GenerateRequest, TokenizedRequest

LONG_TEXT = 16  # characters for each token that the model can read; four are usual


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """What the chat template renders."""

    messages: tuple[ChatMessage, ...]
    options: ChatOptions


def field_of(request: GenerateRequest) -> str:
    """Where the client wrote what is encoded."""
    return "messages" if request.messages is not None else "input" if request.embedding is not None else "prompt"


class Encoder:
    """A transformers fast tokenizer and what its model allows."""

    def __init__(self, tokenizer: Any, files: ModelFiles, *, tool_call_parser: str = "auto", reasoning_parser: str = "auto") -> None:
        self.tokenizer = tokenizer
        self.chat_template = ChatTemplate(tokenizer, is_quick=True)
        self.parsers = self.chat_template.parsers(tool_call_parser, reasoning_parser)
        self.special_tokens = SpecialTokens(tokenizer.backend_tokenizer)
        self.breakers = BreakerTable(tokenizer.backend_tokenizer)
        self.model = files.name
        self.vocab_size = files.vocab_size
        self.eos_token_ids = files.eos_token_ids
        self.can_shorten = files.can_shorten

    def encode(self, requests: list[GenerateRequest], max_model_len: int) -> list[TokenizedRequest | Answer | Invalid]:
        """For each request its tokens, or what else it asked for, or why there is neither."""
        rendered = self.texts(requests, self.chat_template)
        slow = Invalid("the model's chat template takes too long", param="messages", code="chat_template_error")
        return self.encode_rendered(requests, [slow if isinstance(text, Slow) else text for text in rendered], max_model_len)

    def encode_rendered(
        self, requests: list[GenerateRequest], rendered: Sequence[str | None | Invalid], max_model_len: int
    ) -> list[TokenizedRequest | Answer | Invalid]:
        """The same, of requests whose texts are there: what `texts` returned of them."""
        texts = [self._bounded(request, text, max_model_len) for request, text in zip(requests, rendered, strict=True)]
        token_ids = self._encode_texts(requests, texts, max_model_len)
        return [
            text if isinstance(text, Invalid) else ids if isinstance(ids, Invalid) else self._finish(request, text, ids, max_model_len)
            for request, text, ids in zip(requests, texts, token_ids, strict=True)
        ]

    def texts(self, requests: list[GenerateRequest], chat_template: ChatTemplate) -> list[str | None | Invalid | Slow]:
        """The texts to encode, marked where special tokens are spelt in them that are to be text; None: the request brought token ids. Safe in
        threads, each with a ChatTemplate of its own."""
        sources: list[Any] = [
            self._marked(request, request.prompt if request.messages is None else Conversation(request.messages, request.chat)) for request in requests
        ]
        chats = [source for source in sources if isinstance(source, Conversation)]
        rendered = iter(chat_template.render([chat.messages for chat in chats], [chat.options for chat in chats]))
        texts: list[str | None | Invalid | Slow] = []
        for request, source in zip(requests, sources, strict=True):
            if not isinstance(source, Conversation):
                texts.append(MarkedText(source) if isinstance(source, str) and source != request.prompt else source)
                continue
            text, is_marked = next(rendered), source.messages is not request.messages
            texts.append(self._with_own_marks(source, text, chat_template) if is_marked and isinstance(text, str) else text)
        return texts

    def _marked(self, request: GenerateRequest, value: Any) -> Any:
        """A prompt or a conversation, with marks if it needs them; or why it can't have them."""
        is_chat, parses = request.messages is not None, request.encoding.parse_special_tokens
        if not is_chat if parses is None else parses:
            return value
        try:
            return self.special_tokens.mark(value) if self.special_tokens.are_spelled_in(value) else value
        except (Invalid, RecursionError) as error:
            reason = str(error) if isinstance(error, Invalid) else "JSON in it is nested too deep to look for special tokens"
            return Invalid(reason, param="messages" if is_chat else "prompt")

    def _with_own_marks(self, chat: Conversation, text: str, chat_template: ChatTemplate) -> str | Invalid | Slow:
        """The rendered text of a conversation with marks. If they have changed what the template does, it looks for special tokens in contents: it may in what
        the assistant said and thought, of which the model made them; what others spell stays text, and so do calls."""
        unmarked = self.special_tokens.unmark(chat)
        assistants = tuple(
            dataclasses.replace(plain, tool_calls=each.tool_calls) if plain.role == "assistant" else each
            for plain, each in zip(unmarked.messages, chat.messages, strict=True)
        )
        plain, again = chat_template.render([unmarked.messages, assistants], [unmarked.options, chat.options])
        if not isinstance(again, str):
            return again
        if isinstance(plain, Slow):
            return SLOW
        return MarkedText(text if text.replace(MARK, "") == plain else again)

    def _bounded(self, request: GenerateRequest, text: str | None | Invalid, max_model_len: int) -> str | None | Invalid:
        """The text, if it may fit. Megabytes take a tokenizer seconds, and other requests wait: of a long text a part is encoded, and where that is more than
        the model reads, by more than the tokens of a word that is cut, the rest is not."""
        encoding, longest = request.encoding, LONG_TEXT * max_model_len
        if not isinstance(text, str) or len(text) <= longest or request.task != "generate":
            return text
        cuts = encoding.truncate_prompt_tokens is not None
        if cuts and not encoding.keeps_beginning:
            return text
        [ids] = self._encode_batch([text[:longest]], "prompt", add_special_tokens=False)
        if isinstance(ids, Invalid) or len(ids) <= max_model_len + max_model_len // 8:
            return text
        if cuts:
            return type(text)(text[:longest])
        return context_far_exceeded(field_of(request), max_model_len, len(ids))

    def _encode_texts(self, requests: list[GenerateRequest], texts: list[str | None | Invalid], max_model_len: int) -> list[np.ndarray[Any, Any] | Invalid]:
        """One batched call for the templated texts, which bring their own special tokens, and one for plain prompts."""
        token_ids: list[np.ndarray[Any, Any] | Invalid] = [
            np.zeros(0, np.int32) if request.prompt_token_ids is None else request.prompt_token_ids for request in requests
        ]

        def kind(row: int) -> tuple[bool, bool]:
            """Whether it is a conversation, and whether special tokens are added."""
            added, is_chat = requests[row].encoding.add_special_tokens, requests[row].messages is not None
            return is_chat, not is_chat if added is None else added

        for (is_chat, adds), group in groupby(sorted((row for row, text in enumerate(texts) if isinstance(text, str)), key=kind), key=kind):
            rows, param = list(group), "messages" if is_chat else "prompt"
            pairs = [row for row in rows if requests[row].pair is not None]
            plain = [row for row in rows if not isinstance(texts[row], MarkedText) and row not in pairs]
            if plain:
                for row, ids in zip(plain, self._encode_batch([str(texts[row]) for row in plain], param, add_special_tokens=adds), strict=True):
                    token_ids[row] = ids
            for row in pairs:
                token_ids[row] = self._encode_pair(requests[row], str(texts[row]), max_model_len, adds_special_tokens=adds)
            for row in rows:
                if isinstance(text := texts[row], MarkedText):
                    token_ids[row] = self._encode_marked(text, param, add_special_tokens=adds)
        return token_ids

    def _encode_pair(self, request: GenerateRequest, text: str, max_model_len: int, *, adds_special_tokens: bool) -> np.ndarray[Any, Any] | Invalid:
        """Both texts as the tokenizer joins them. Of a pair that is too long the longer one is cut, if the request wants that."""
        most = request.encoding.truncate_prompt_tokens
        cut = {"truncation": "longest_first", "max_length": most if most > 0 else max_model_len} if most is not None else {}
        try:
            return np.asarray(self.tokenizer(text, request.pair, add_special_tokens=adds_special_tokens, verbose=False, **cut)["input_ids"], np.int32)
        except Exception as error:  # a tokenizer raises what it likes
            return Invalid(f"the texts can't be encoded: {error}", param="input")
        finally:
            self.tokenizer.backend_tokenizer.no_truncation()  # else it cuts what others encode next

    def _encode_marked(self, text: MarkedText, param: str, *, add_special_tokens: bool) -> np.ndarray[Any, Any] | Invalid:
        try:
            return np.asarray(self.special_tokens.encode(text, add_special_tokens=add_special_tokens), np.int32)
        except Exception as error:  # a tokenizer raises what it likes
            return Invalid(str(error) if isinstance(error, Invalid) else f"the text can't be encoded: {error}", param=param)

    def _encode_batch(self, texts: list[str], param: str, *, add_special_tokens: bool) -> list[np.ndarray[Any, Any] | Invalid]:
        """All at once; if that fails, each alone, so that a text that can't be encoded fails by itself."""
        try:
            encoded = self.tokenizer(texts, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        except Exception as error:  # a tokenizer raises what it likes
            if len(texts) == 1:
                return [Invalid(f"the text can't be encoded: {error}", param=param)]
            return [each for text in texts for each in self._encode_batch([text], param, add_special_tokens=add_special_tokens)]
        return [np.asarray(ids, np.int32) for ids in encoded]

    def _finish(self, request: GenerateRequest, text: str | None, token_ids: np.ndarray[Any, Any], max_model_len: int) -> TokenizedRequest | Answer | Invalid:
        try:
            opening = self._opening(request, text)
            if request.task != "generate":
                return self._answer(request, text, token_ids, max_model_len, opening)
            kept = self._truncated(request, token_ids, max_model_len)
            if len(kept) < len(token_ids) or isinstance(text, MarkedText):
                text, token_ids = None, kept
            max_tokens = self._check(request, token_ids, max_model_len)
            bad_words = self._spell_bad_words(request.params.bad_words)
            echo_text = (text if text is not None else self._decode(token_ids)) if request.echo else opening
            wants_offsets = request.echo and request.params.prompt_logprobs is not None
            echo_offsets = self._offsets(request, text, token_ids) if wants_offsets else np.zeros(0, np.int32)
            constraint = request.constraint if opening is None or request.constraint is None else dataclasses.replace(request.constraint, thought_begin="")
            dry_breakers = self.breakers.pack(request.params.dry.sequence_breakers) if request.params.dry is not None else np.zeros(0, np.int32)
        except Invalid as error:
            return error
        return TokenizedRequest(
            request_id=request.request_id,
            gateway_id=request.gateway_id,
            model=request.model,
            params=dataclasses.replace(request.params, max_tokens=max_tokens, bad_words_token_ids=bad_words),
            prompt_token_ids=token_ids,
            eos_token_ids=() if request.params.ignore_eos and request.constraint is None else self.eos_token_ids,  # a grammar has its own end
            echo_text=echo_text,
            created_at=request.created_at,
            scheduling=request.scheduling,
            echo_offsets=echo_offsets,
            constraint=constraint,
            dry_breakers=dry_breakers,
            embedding=request.embedding,
            traceparent=request.traceparent,
        )

    def _spell_bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word as it stands at a beginning, and after a space."""
        texts = [text for word in words for text in (word.lstrip(), f" {word.lstrip()}") if text.strip()]
        spelt = self._encode_batch(texts, "bad_words", add_special_tokens=False) if texts else []
        if any(isinstance(each, Invalid) or not len(each) for each in spelt) or len(texts) < 2 * len(words):
            raise Invalid("bad_words holds a text that has no tokens", param="bad_words")
        return tuple(dict.fromkeys(tuple(each.tolist()) for each in spelt if not isinstance(each, Invalid)))

    def _opening(self, request: GenerateRequest, text: str | None) -> str | None:
        """What the template has said of the answer, as far as its reader must know it. An answer that has to match from its first token on begins anew."""
        if request.messages is None or text is None or (request.constraint is not None and not request.constraint.thought_end):
            return None
        return opened_thought(text, self.parsers.get("reasoning", ""), request.chat) or None

    def _answer(self, request: GenerateRequest, text: str | None, token_ids: np.ndarray[Any, Any], max_model_len: int, opening: str | None) -> Answer:
        """What a request other than for a generation asks. Raises Invalid."""
        if request.task == "render":
            return rendered_prompt((text or "").replace(MARK, ""))
        if request.task == "tokenize":
            kept = self._truncated(request, token_ids, max_model_len).tolist()
            strs = self.tokenizer.convert_ids_to_tokens(kept) if request.encoding.return_token_strs else None
            return tokenized(kept, strs, max_model_len, self.eos_token_ids, opening or "")
        if request.task == "detokenize":
            self._check_ids(request, token_ids)
            return detokenized(self._decode(token_ids, skips_special=request.params.skip_special_tokens))
        return describe(self.tokenizer, self.model, max_model_len, self.eos_token_ids)

    def _truncated(self, request: GenerateRequest, token_ids: np.ndarray[Any, Any], max_model_len: int) -> np.ndarray[Any, Any]:
        """The last tokens of the prompt, or the first, as many as the request wants of it."""
        most = request.encoding.truncate_prompt_tokens
        if most is None:
            return token_ids
        if most < 0:
            wanted = 1 if request.params.max_tokens is None else request.params.max_tokens
            most = max(1, max_model_len - (wanted if wanted < max_model_len else 1))
        if not request.encoding.keeps_beginning or most >= len(token_ids):
            return token_ids[-most:]
        ending = self.ending if token_ids[len(token_ids) - len(self.ending) :].tolist() == self.ending.tolist() else self.ending[:0]
        return np.concatenate((token_ids[: max(0, most - len(ending))], ending[:most]))

    @cached_property
    def ending(self) -> np.ndarray[Any, Any]:
        """The special tokens that the tokenizer puts at every text's end, such as [SEP]."""
        empty, word = self._encode_batch(["", "a"], "input", add_special_tokens=True)
        if isinstance(empty, Invalid) or isinstance(word, Invalid):
            return np.zeros(0, np.int32)
        num_shared = next((count for count, pair in enumerate(zip(empty[::-1], word[::-1], strict=False)) if pair[0] != pair[1]), len(empty))
        return empty[len(empty) - num_shared :]

    def _decode(self, token_ids: np.ndarray[Any, Any], *, skips_special: bool = False) -> str:
        try:
            return str(self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=skips_special))
        except Exception as error:
            raise Invalid(f"the tokens can't be made text: {error}", param="prompt") from None

    def _offsets(self, request: GenerateRequest, text: str | None, token_ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Where each token begins in the text that is echoed; None: the text is decoded. What the text lacks, as a BOS, begins where the next one does."""
        if text is None:
            return self._decoded_offsets(token_ids.tolist())
        offsets, end, adds = [], 0, request.encoding.add_special_tokens is not False
        for begin, own_end in self.tokenizer(text, add_special_tokens=adds, return_offsets_mapping=True, verbose=False)["offset_mapping"]:
            offsets.append(end if begin == own_end else min(begin, end))  # less than the end: a part of a character; more: of some, spaces are cut off
            end = max(end, own_end)
        return np.array(offsets, np.int32)

    def _decoded_offsets(self, token_ids: list[int]) -> np.ndarray[Any, Any]:
        """Of the tokens in their text, special ones included."""
        stream, offsets, end = DecodeStream(skip_special_tokens=False), [], 0
        for token_id in token_ids:
            offsets.append(end)
            try:
                end += len(stream.step(self.tokenizer.backend_tokenizer, token_id) or "")
            except Exception as error:  # bare, from Rust
                raise Invalid(f"the prompt's tokens can't be made text one by one: {error}", param="prompt") from None
        return np.array(offsets, np.int32)

    def _check(self, request: GenerateRequest, token_ids: np.ndarray[Any, Any], max_model_len: int) -> int:
        """The request's max_tokens, cut to what the prompt leaves of the model's length: an answer that gets there ends with `length`.

        Many agents always ask for more than a small model has. Raises Invalid for a prompt that leaves no room at all.
        """
        params, n, field = request.params, len(token_ids), field_of(request)
        if n == 0:
            raise Invalid("the prompt is empty: it has no tokens", param=field)
        self._check_ids(request, token_ids)
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids), ("allowed_token_ids", params.allowed_token_ids)):
            if any(token >= self.vocab_size for token in ids):
                raise Invalid(f"{name} names a token outside the vocabulary, [0, {self.vocab_size})", param=name)
        if params.prompt_logprobs is not None and (n - 1) * (1 + params.prompt_logprobs) > MAX_PROMPT_LOGPROBS:
            reason = f"the prompt has {n} tokens, and a request takes at most {MAX_PROMPT_LOGPROBS} logprobs of its prompt: ask for fewer of each token"
            raise Invalid(reason, param="prompt_logprobs")
        dimensions = request.embedding.dimensions if request.embedding is not None else None
        if dimensions is not None and not self.can_shorten(dimensions):
            raise Invalid(f"this model's embeddings can't be cut to {dimensions} dimensions: it was not trained for that", param="dimensions")
        room = max_model_len - n
        if (least := 0 if params.max_tokens == 0 else 1) > room:
            raise context_exceeded(field, max_model_len, n, least)
        if params.min_tokens > (max_tokens := room if params.max_tokens is None else min(params.max_tokens, room)):
            raise Invalid(f"min_tokens is {params.min_tokens}, but at most {max_tokens} fit", param="min_tokens")
        return max_tokens

    def _check_ids(self, request: GenerateRequest, token_ids: np.ndarray[Any, Any]) -> None:
        """Raises Invalid for token ids of the client's that no token has."""
        if request.prompt_token_ids is not None and len(token_ids) and not (int(token_ids.min()) >= 0 and int(token_ids.max()) < self.vocab_size):
            name = "tokens" if request.task == "detokenize" else "input" if request.embedding is not None else "prompt"
            raise Invalid(f"{name} holds token ids outside the vocabulary, [0, {self.vocab_size})", param=name)
