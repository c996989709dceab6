"""Text to token ids, for a batch of requests at once, and the checks that need the vocabulary or the length."""

import dataclasses
from typing import Any

import numpy as np
from tokenizers.decoders import DecodeStream

from services.tokenizer.answers import Answer, tokenized
from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.template_features import opened_thought
from shared.errors import Invalid
from shared.messages import GenerateRequest, TokenizedRequest
from shared.model_files import ModelFiles
from shared.sampling_params import MAX_PROMPT_LOGPROBS


class Encoder:
    """A transformers fast tokenizer and what its model allows."""

    def __init__(self, tokenizer: Any, files: ModelFiles, *, tool_call_parser: str = "auto", reasoning_parser: str = "auto") -> None:
        self.tokenizer = tokenizer
        self.chat_template = ChatTemplate(tokenizer)
        self.parsers = self.chat_template.parsers(tool_call_parser, reasoning_parser)
        self.model = files.name
        self.vocab_size = files.vocab_size
        self.eos_token_ids = files.eos_token_ids
        self.can_shorten = files.can_shorten

    def encode(self, requests: list[GenerateRequest], max_model_len: int) -> list[TokenizedRequest | Answer | Invalid]:
        """For each request its tokens, handed on or as the answer, or why there are none."""
        texts = self._texts(requests)
        token_ids = self._encode_texts(requests, texts)
        return [
            text if isinstance(text, Invalid) else ids if isinstance(ids, Invalid) else self._finish(request, text, ids, max_model_len)
            for request, text, ids in zip(requests, texts, token_ids, strict=True)
        ]

    def _texts(self, requests: list[GenerateRequest]) -> list[str | None | Invalid]:
        """The texts to encode; None: the request brought token ids."""
        chats = [request for request in requests if request.messages is not None]
        rendered = iter(self.chat_template.render([request.messages or () for request in chats], [request.chat for request in chats]))
        return [request.prompt if request.messages is None else next(rendered) for request in requests]

    def _encode_texts(self, requests: list[GenerateRequest], texts: list[str | None | Invalid]) -> list[np.ndarray[Any, Any] | Invalid]:
        """One batched call for the templated texts, which bring their own special tokens, and one for plain prompts."""
        token_ids: list[np.ndarray[Any, Any] | Invalid] = [
            np.zeros(0, np.int32) if request.prompt_token_ids is None else request.prompt_token_ids for request in requests
        ]
        for is_chat in (True, False):
            rows = [row for row, text in enumerate(texts) if isinstance(text, str) and (requests[row].messages is not None) == is_chat]
            if rows:
                for row, ids in zip(rows, self._encode_batch([str(texts[row]) for row in rows], add_special_tokens=not is_chat), strict=True):
                    token_ids[row] = ids
        return token_ids

    def _encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> list[np.ndarray[Any, Any] | Invalid]:
        """All at once; if that fails, each alone, so that a text that can't be encoded fails by itself."""
        try:
            encoded = self.tokenizer(texts, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        except Exception as error:  # a tokenizer raises what it likes
            if len(texts) == 1:
                return [Invalid(f"the text can't be encoded: {error}", param="messages" if not add_special_tokens else "prompt")]
            return [each for text in texts for each in self._encode_batch([text], add_special_tokens=add_special_tokens)]
        return [np.asarray(ids, np.int32) for ids in encoded]

    def _finish(self, request: GenerateRequest, text: str | None, token_ids: np.ndarray[Any, Any], max_model_len: int) -> TokenizedRequest | Answer | Invalid:
        if request.task == "tokenize":
            return tokenized(token_ids.tolist(), max_model_len)
        try:
            max_tokens = self._check(request, token_ids, max_model_len)
            bad_words = self._spell_bad_words(request.params.bad_words)
            echo_text = self._echo(text, token_ids) if request.echo else self._opening(request, text)
            wants_offsets = request.echo and request.params.prompt_logprobs is not None
            echo_offsets = self._offsets(text, token_ids) if wants_offsets else np.zeros(0, np.int32)
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
            constraint=request.constraint,
            embedding=request.embedding,
        )

    def _spell_bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word as it stands at a beginning, and after a space."""
        texts = [text for word in words for text in (word.lstrip(), f" {word.lstrip()}") if text.strip()]
        spelt = self._encode_batch(texts, add_special_tokens=False) if texts else []
        if any(isinstance(each, Invalid) or not len(each) for each in spelt) or len(texts) < 2 * len(words):
            raise Invalid("bad_words holds a text that has no tokens", param="bad_words")
        return tuple(dict.fromkeys(tuple(each.tolist()) for each in spelt if not isinstance(each, Invalid)))

    def _opening(self, request: GenerateRequest, text: str | None) -> str | None:
        """What the template has said of the answer, as far as its reader must know it. An answer that has to match something begins anew."""
        if request.messages is None or request.constraint is not None or text is None:
            return None
        return opened_thought(text, self.parsers.get("reasoning", ""), request.chat) or None

    def _echo(self, text: str | None, token_ids: np.ndarray[Any, Any]) -> str:
        try:
            return text if text is not None else str(self.tokenizer.decode(token_ids.tolist()))
        except Exception as error:
            raise Invalid(f"the prompt's tokens can't be made text: {error}", param="prompt") from None

    def _offsets(self, text: str | None, token_ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Where each token begins in the text that is echoed; None: the text is decoded. What the text lacks, as a BOS, begins where the next one does."""
        if text is None:
            return self._decoded_offsets(token_ids.tolist())
        offsets, end = [], 0
        for begin, own_end in self.tokenizer(text, return_offsets_mapping=True, verbose=False)["offset_mapping"]:
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
        """The request's max_tokens, bounded by what the prompt leaves of the model's length."""
        params, n = request.params, len(token_ids)
        field = "messages" if request.messages is not None else "input" if request.embedding is not None else "prompt"
        if n == 0:
            raise Invalid("the prompt is empty: it has no tokens", param=field)
        if request.prompt_token_ids is not None and not (int(token_ids.min()) >= 0 and int(token_ids.max()) < self.vocab_size):
            raise Invalid(f"prompt holds token ids outside the vocabulary, [0, {self.vocab_size})", param=field)
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
        if (1 if params.max_tokens is None else params.max_tokens) > room:
            wanted = n + (1 if params.max_tokens is None else params.max_tokens)
            parts = f" ({n} in the {field}, {params.max_tokens} in the completion)" if params.max_tokens is not None else f" ({n} in the {field})"
            reason = f"This model's maximum context length is {max_model_len} tokens. However, you requested {wanted} tokens{parts}. Please reduce one of them."
            raise Invalid(reason, param=field, code="context_length_exceeded")
        if params.min_tokens > (max_tokens := room if params.max_tokens is None else params.max_tokens):
            raise Invalid(f"min_tokens is {params.min_tokens}, but at most {max_tokens} fit", param="min_tokens")
        return max_tokens
