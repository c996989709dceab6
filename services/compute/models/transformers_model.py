"""Every other model: transformers' own modules, over the paged cache. Slower than a native
executor, and complete.

The library brings layers, positions, norms and logits; cache and attention are in
transformers_attention.py. A checkpoint is data: code that comes with it is never run.
"""

import inspect
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging

from services.compute.backends.backend import Backend, Workspace
from services.compute.backends.torch.backend import TorchBackend
from services.compute.models.decoder import ForwardBatch
from services.compute.models.kernel_attention import KernelStep, make_kernel_layers
from services.compute.models.library_errors import first_line
from services.compute.models.recurrent_states import KINDS, SequenceStates
from services.compute.models.transformers_attention import (
    ATTENTION,
    FAR,
    OTHER_STATE,
    AttentionBatch,
    Handed,
    LayerShape,
    PagedLayer,
    PassingCache,
    Probe,
    RaggedStep,
    SequenceCache,
    Unsupported,
    current_step,
    group_sequences,
    register,
)
from shared.process.errors import StartupError
from shared.process.host_memory import is_out_of_memory

# their frequencies follow the longest sequence of a step
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
# of transformers' config, of patterns of the checkpoint's names, and of the class that makes it: a model
LoadModules = Callable[[Any, dict[str, str] | None, Any], Any]
# names of a text's part in the checkpoint of a model that sees: those of the text alone
TEXT_NAMES = {r"^language_model\.lm_head\.": "lm_head.", r"^(model\.)?(language|text)_model\.(model\.)?": "model."}
WHOLE = ("minimax_m3_vl",)  # see whose own classes alone know the published names of experts
ONE, OTHER = 5, 6  # token ids of a probe, which no tokenizer uses for padding, whose embedding may be zero
KEPT_ELSEWHERE = "its layers keep keys and values elsewhere"
ROUNDING = 1e-3  # of the largest number: more than the order of a sum changes, less than a token or a position does
CACHE_NAMES = ("cache", "past_key_values")  # of forward's parameter: since transformers 5.24, and before


@dataclass(frozen=True, slots=True)
class TransformersConfig:
    """The configuration that scheduler and cache need."""

    vocab_size: int
    num_layers: int  # that have K and V
    num_kv_heads: int  # of the layer that has most
    head_dim: int  # of the widest

    @property
    def kv_heads(self) -> tuple[tuple[int, int], ...]:
        """See CacheShape."""
        return ((self.num_kv_heads, self.head_dim),) * self.num_layers


@dataclass(frozen=True, slots=True)
class Probed:
    """The findings of a probe."""

    shapes: dict[int, LayerShape]  # of the layers that have K and V, by the library's numbers for them
    vocab_size: int
    state_bytes: int = 0  # of a sequence, in addition to its K and V
    continues_chunks: bool = True  # whether several tokens may follow a state at once


# blocks of a model without K and V account for its sequences' lengths, and hold next to nothing
NO_KV = {0: LayerShape(1, 8, 8)}


class TransformersModel:
    """An AutoModelForCausalLM as an executor."""

    splits_prompts = True
    is_row_invariant = finds_slots = False
    longest_text = None

    def __init__(self, model: Any, backend: Backend, *, is_ragged: bool) -> None:
        """Raises Unsupported if the model can't run in this way."""
        self.parameters = set(inspect.signature(model.forward).parameters)
        probed = (probe_row if is_ragged else probe_alone)(model, self.parameters)
        self.model = model
        self.shapes = dict(sorted(probed.shapes.items())) or NO_KV
        self.state_bytes, self.continues_chunks = probed.state_bytes, probed.continues_chunks
        self.sequence_states: dict[int, SequenceStates] = {}  # by handle, of a model that has some
        self.is_ragged = self.takes_segments = is_ragged
        self.implementation = f"transformers ({'ragged' if is_ragged else 'one by one'})"
        self._logit_rows = torch.zeros(0, dtype=torch.int64)  # of the last step
        # of the last step, pass by pass: the hidden states [1, tokens, hidden] of which its logits
        # were made
        self._head_inputs: list[Tensor] = []
        model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: self._head_inputs.append(inputs[0]))
        self.config = TransformersConfig(
            vocab_size=probed.vocab_size,
            num_layers=len(self.shapes),
            num_kv_heads=max(shape.num_kv_heads for shape in self.shapes.values()),
            head_dim=max(max(shape.k_dim, shape.v_dim) for shape in self.shapes.values()),
        )
        heads = self.config.num_kv_heads, self.config.head_dim
        plain = {
            number: shape.plain
            for number, shape in self.shapes.items()
            if shape.plain is not None and (shape.num_kv_heads, shape.k_dim, shape.v_dim) == (*heads, heads[1])
        }
        self.kernels = make_kernel_layers(backend, *heads, plain)
        self.backend = backend if self.kernels else TorchBackend(backend.dtype, backend.device)

    def workspace(self, num_tokens: int, num_logits: int, max_model_len: int) -> Workspace:  # noqa: ARG002
        """Bytes of logits, in the model's dtype and in float32: what the library's modules take
        besides is their own affair."""
        return Workspace(0, num_logits * self.config.vocab_size * (self.backend.dtype.itemsize + 4))

    def plan(self, batch: ForwardBatch, block_size: int) -> list[AttentionBatch]:
        """The sequences whose attention is one call, or that are a pass of their own."""
        if len(self.kernels) == len(self.shapes):
            return []
        return group_sequences(batch, block_size, is_each_alone=not self.is_ragged)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, plan: list[AttentionBatch], kv_layers: Sequence[Tensor]) -> Tensor:
        """Write the step's K and V. Returns the logits of the batch's logit_rows, [R, vocab]
        float32: the library's head is a part of its models."""
        self._logit_rows = batch.logit_rows
        self._head_inputs.clear()
        for handle in batch.left:
            self.sequence_states.pop(handle, None)
        layers = {
            number: PagedLayer(kv, self.config.head_dim, shape)
            for (number, shape), kv in zip(self.shapes.items(), kv_layers, strict=True)
        }
        if not self.is_ragged:
            return torch.cat([self._run_alone(batch, number, group, layers) for number, group in enumerate(plan)])
        kernels = KernelStep(batch, self.kernels) if self.kernels else None
        token = current_step.set(RaggedStep(batch.slot_mapping, plan, layers, kernels))
        try:
            return self._call(batch, slice(None), PassingCache(), batch.logit_rows)
        finally:
            current_step.reset(token)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """The same as Decoder.logits."""
        return hidden[torch.searchsorted(self._logit_rows, rows)]

    def states(self, hidden: Tensor, rows: Tensor) -> Tensor:  # noqa: ARG002
        """The same as Decoder.states."""
        return torch.cat(self._head_inputs)[torch.searchsorted(self._logit_rows, rows)].float()

    def _run_alone(
        self, batch: ForwardBatch, number: int, group: AttentionBatch, layers: dict[int, PagedLayer]
    ) -> Tensor:
        """A group of one sequence, the number-th of the step."""
        first, end, length = int(group.rows[0, 0]), int(group.rows[0, -1]) + 1, int(group.positions[0, 0])
        states = self._states_of(batch.handles, number, length)
        is_split = not self.continues_chunks and length > 0
        logits = []
        for start in range(first, end) if is_split else (first,):
            rows = slice(start, start + 1 if is_split else end)
            cache = SequenceCache(
                layers, group.block_tables[0], batch.slot_mapping[rows], length + start - first, states
            )
            wanted = batch.logit_rows[(batch.logit_rows >= rows.start) & (batch.logit_rows < rows.stop)] - rows.start
            logits.append(self._call(batch, rows, cache, wanted))
        if states is not None:
            states.length += end - first
        return torch.cat(logits)

    def _states_of(self, handles: list[int] | None, number: int, length: int) -> SequenceStates | None:
        """The states of the step's number-th sequence behind its first `length` tokens; None: the model has none. A
        sequence that begins, or begins again, has new ones."""
        if not self.state_bytes:
            return None
        assert handles is not None, "states belong to a sequence"
        handle = handles[number]
        states = self.sequence_states[handle] if length else SequenceStates()
        assert states.length == length, "a state stands behind all tokens before it"
        if handle >= 0:  # otherwise it is no sequence of the scheduler's
            self.sequence_states[handle] = states
        return states

    def _call(self, batch: ForwardBatch, tokens: slice, cache: PassingCache, rows: Tensor) -> Tensor:
        """Logits of some rows of these tokens, [R, vocab] float32."""
        input_ids = batch.input_ids[tokens]
        inputs: dict[str, Any] = {"input_ids": input_ids[None]}
        if batch.overlay is not None:
            x = self.model.get_input_embeddings()(batch.input_ids)
            x[batch.overlay.rows] = batch.overlay.values
            inputs = {"inputs_embeds": x[tokens][None]}
        length = None if self.is_ragged or self.shapes is NO_KV else cache.get_seq_length() + len(input_ids)
        logits = run_modules(self.model, self.parameters, inputs, batch.positions[tokens], length, rows, cache)
        if "logits_to_keep" not in self.parameters:
            self._head_inputs[-1] = self._head_inputs[-1][:, rows]
        self._head_inputs[-1] = self._head_inputs[-1][0]
        return logits


def run_modules(
    model: Any,
    parameters: Collection[str],
    inputs: dict[str, Any],
    positions: Tensor,
    length: int | None,
    rows: Tensor,
    cache: PassingCache,
) -> Tensor:
    """A pass over one row of tokens. parameters: of the model's forward; inputs: the tokens; positions:
    [tokens]; length: of the sequence after the pass; None: no mask is made of it. Returns the logits of
    some rows, [R, vocab] float32."""
    wanted: dict[str, Any] = {
        "position_ids": positions[None],
        "attention_mask": None if length is None else torch.ones((1, length), dtype=torch.int64, device=rows.device),
        "logits_to_keep": rows,
    }
    terms = {name: value for name, value in wanted.items() if name in parameters}
    logits: Tensor = model(**inputs, use_cache=True, **{cache_name(parameters): cache}, **terms).logits[0]
    return (logits if "logits_to_keep" in parameters else logits[rows]).float()


def load_transformers_model(
    folder: Path,
    backend: Backend,
    max_model_len: int | None,
    load: LoadModules,
) -> TransformersModel:
    """Read config.json and the weights. backend: whose dtype and device the model has;
    max_model_len: of the sequences to come, in tokens; None: no bound; load: makes the modules. Raises
    StartupError for a model that can't run over a paged cache, and says why."""
    register()
    logging.set_verbosity_error()
    config, model_class = read_library_config(folder)
    check_rope(config, max_model_len)
    is_part = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type") != config.model_type
    model = load(config, TEXT_NAMES if is_part else None, auto_class(config))
    reason = ""
    for attention in (ATTENTION, "eager"):
        try:
            model.set_attn_implementation(attention)
            return TransformersModel(model, backend, is_ragged=attention == ATTENTION)
        except Unsupported as error:
            reason = str(error)
    raise StartupError(f"{model_class.__name__} can't run over a paged KV cache: {reason}")


def read_library_config(folder: Path) -> tuple[Any, Any]:
    """The library's config, and the class of the model: of its text's part, if it sees and that has one. Raises
    StartupError for what is no language model of the library's own."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # ValueError, KeyError, OSError, those of dataclasses: whatever config.json leads to
        if "auto_map" in json.loads((folder / "config.json").read_text(encoding="utf-8")):
            raise StartupError(
                f"{folder}: this model needs code that comes with it (trust_remote_code), which is never run"
            ) from None
        raise StartupError(f"{folder}: transformers can't read config.json: {first_line(error)}") from None
    if config.is_encoder_decoder:
        raise StartupError(f"{config.model_type} is an encoder-decoder; only decoders can be served")
    text = config.get_text_config()
    if text is not config and type(text) in AutoModelForCausalLM._model_mapping and config.model_type not in WHOLE:
        tied = json.loads((folder / "config.json").read_text(encoding="utf-8")).get(
            "tie_word_embeddings"
        )  # of a model that sees
        text.tie_word_embeddings = getattr(text, "tie_word_embeddings", False) if tied is None else tied
        config = text
    found = auto_class(config)._model_mapping.get(type(config), None)
    if found is None:
        raise StartupError(f"{config.model_type} is not a language model that transformers knows")
    return config, found[0] if isinstance(found, tuple) else found


def auto_class(config: Any) -> Any:
    """The library's class that makes the model: of text, or, called with text alone, of one that sees whose text has
    no class of its own."""
    is_text = type(config) in AutoModelForCausalLM._model_mapping and config.model_type not in WHOLE
    return AutoModelForCausalLM if is_text else AutoModelForImageTextToText


def check_rope(config: Any, max_model_len: int | None) -> None:
    """Raises StartupError where a sequence's rotary frequencies would follow the longest sequence
    of its step."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    for each in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if each.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            limit = int(each.get("original_max_position_embeddings") or text.max_position_embeddings)
            if max_model_len is None or max_model_len > limit:
                raise StartupError(
                    f"rope scaling {each['rope_type']!r} treats sequences alike only up to {limit} tokens: "
                    f"--max-model-len {limit}"
                )


def probe_row(model: Any, parameters: Collection[str]) -> Probed:
    """Run a row of three sequences of a token each, to learn which layers have K and V, of what shape,
    and how many logits there are. Raises Unsupported if the model can't run so.

    What a layer computes of a token must follow from the token and its position alone: the first and
    the last are the same, and a cache that says it holds more must change nothing.
    """
    if "position_ids" not in parameters:
        raise Unsupported("it takes no position_ids")
    near, far = PassingCache(), PassingCache(FAR)
    (logits, handed), (others, handed_far) = (
        run_probe(model, parameters, (ONE, OTHER, ONE), (0, 1, 0), cache) for cache in (near, far)
    )
    if not handed or handed.keys() != near.shapes.keys():
        raise Unsupported(KEPT_ELSEWHERE)
    pairs = [(logits, others), (logits[:1], logits[2:])]
    for layer, each in handed.items():
        other = handed_far[layer]
        pairs += [(each.q, other.q), (each.k, other.k), (each.v, other.v), (each.mask, other.mask)]
        pairs += [(tensor[:1], tensor[2:]) for tensor in (each.q, each.k, each.v)]
    if not all(is_near(one, other, model.dtype) for one, other in pairs):
        raise Unsupported("what it computes of a token depends on its place in the row, or on the length of its cache")
    shapes = {
        layer: LayerShape(each.k.shape[1], each.k.shape[-1], each.v.shape[-1], each.plain)
        for layer, each in handed.items()
    }
    return Probed(shapes, logits.shape[-1])


def probe_alone(model: Any, parameters: Collection[str]) -> Probed:
    """The same of one sequence's tokens. Raises Unsupported where the second token changes the first's
    logits; where another sequence in between changes the next's: a state that no cache holds; and where a token
    does not follow from the states before it."""

    def run(token_ids: tuple[int, ...], cache: PassingCache) -> Tensor:
        places = range(cache.length, cache.length + len(token_ids))
        return run_probe(model, parameters, token_ids, tuple(places), cache, places.stop if has_kv else None)[0]

    has_kv, cache = True, PassingCache(states=SequenceStates())
    logits = run((ONE, ONE), cache)
    has_kv = bool(cache.shapes)
    assert cache.states is not None
    if not cache.shapes and not cache.states.layers:
        raise Unsupported(KEPT_ELSEWHERE)
    if not is_near(logits[0], run((ONE, OTHER), PassingCache(states=SequenceStates()))[0], model.dtype):
        raise Unsupported("its attention is not causal")
    layers = {
        number: PagedLayer(empty_block(shape, model), max(shape.k_dim, shape.v_dim), shape)
        for number, shape in cache.shapes.items()
    }

    def run_at(first: int, token_ids: tuple[int, ...], states: SequenceStates) -> Tensor:
        slots = torch.arange(first, first + len(token_ids), device=model.device)
        return run(token_ids, SequenceCache(layers, torch.zeros_like(slots[:1]), slots, first, states))

    is_continued = []  # by one token, and by two
    for before, tokens in (((ONE, OTHER), (ONE,)), ((ONE,), (OTHER, ONE))):
        states = SequenceStates()
        run_at(0, before, states)
        logits = run_at(len(before), tokens, states.copy())
        run((OTHER, ONE), PassingCache(states=SequenceStates()))
        again = run_at(len(before), tokens, states.copy())
        if not is_near(logits, again, model.dtype):
            raise Unsupported(OTHER_STATE)
        # the same sums in the same order: what differs no more than two equal runs has not read the state
        changed = [
            (logits - run_at(len(before), tokens, states.copy(without=kind))).abs().max()
            for kind in KINDS
            if states.tensors(kind)
        ]
        is_continued.append(all(change > (logits - again).abs().max() for change in changed))
    if not is_continued[0]:
        raise Unsupported("it forgets its states from one token to the next")
    return Probed(cache.shapes, logits.shape[-1], cache.states.num_bytes, is_continued[1])


def empty_block(shape: LayerShape, model: Any) -> Tensor:
    """A layer's cache of three tokens."""
    return torch.zeros(
        (2, 1, shape.num_kv_heads, 3, max(shape.k_dim, shape.v_dim)), dtype=model.dtype, device=model.device
    )


def is_near(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Whether two results are equal but for rounding, which the number of rows of a product changes."""
    one, other = one.float(), other.float()
    return torch.allclose(one, other, rtol=0.0, atol=max(ROUNDING, 4 * torch.finfo(dtype).eps) * float(one.abs().max()))


def cache_name(parameters: Collection[str]) -> str:
    """The parameter of a model's forward that takes the KV cache. Raises Unsupported without one."""
    for name in CACHE_NAMES:
        if name in parameters:
            return name
    raise Unsupported("it has no KV cache")


def run_probe(
    model: Any,
    parameters: Collection[str],
    token_ids: tuple[int, ...],
    positions: tuple[int, ...],
    cache: PassingCache,
    length: int | None = None,
) -> tuple[Tensor, dict[int, Handed]]:
    """The logits of these tokens, and what each layer handed to attention; length: as of run_modules.
    Raises Unsupported."""
    step = Probe()
    token = current_step.set(step)
    ids, places, rows = (
        torch.tensor(each, device=model.device) for each in (token_ids, positions, range(len(token_ids)))
    )
    try:
        with torch.inference_mode():
            logits = run_modules(model, parameters, {"input_ids": ids[None]}, places, length, rows, cache)
    except Unsupported:
        raise
    except Exception as error:  # what a model asks for besides keys and values is its own affair
        if is_out_of_memory(error):
            raise
        raise Unsupported(f"it needs more than a cache of keys and values: {first_line(error)}") from None
    finally:
        current_step.reset(token)
    if not bool(logits.isfinite().all()):
        raise Unsupported("its logits are not finite")
    return logits, step.handed
