"""Every other model: transformers' own modules, over the paged cache. Slower than a native
executor, and complete.

The library brings layers, positions, norms and logits; cache and attention are in
transformers_attention.py. A checkpoint is data: code that comes with it is never run.
"""

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging

from services.compute.backends.backend import Backend, Workspace
from services.compute.backends.torch.backend import TorchBackend
from services.compute.backends.torch.recurrent import StateRows
from services.compute.models.decoder import ForwardBatch
from services.compute.models.kernel_attention import KernelStep, make_kernel_layers
from services.compute.models.library_errors import first_line
from services.compute.models.probe import probe_alone, probe_row
from services.compute.models.recurrent_states import SequenceStates
from services.compute.models.sizes import LARGEST, check_size
from services.compute.models.transformers_attention import (
    ATTENTION,
    AttentionBatch,
    LayerShape,
    PagedLayer,
    PassingCache,
    RaggedStep,
    SequenceCache,
    Unsupported,
    current_step,
    group_sequences,
    register,
    run_modules,
)
from shared.process.errors import StartupError

# their frequencies follow the longest sequence of a step
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
# of transformers' config, of patterns of the checkpoint's names, and of the class that makes it: a model
LoadModules = Callable[[Any, dict[str, str] | None, Any], Any]
# names of a text's part in the checkpoint of a model that sees: those of the text alone
TEXT_NAMES = {r"^language_model\.lm_head\.": "lm_head.", r"^(model\.)?(language|text)_model\.(model\.)?": "model."}
WHOLE = ("minimax_m3_vl",)  # see whose own classes alone know the published names of experts


@dataclass(frozen=True, slots=True)
class TransformersConfig:
    """The configuration that scheduler and cache need."""

    vocab_size: int
    num_layers: int
    num_kv_heads: int  # of the layer that has most
    head_dim: int  # of the widest

    @property
    def kv_heads(self) -> tuple[tuple[int, int], ...]:
        """See CacheShape."""
        return ((self.num_kv_heads, self.head_dim),) * self.num_layers


# of a model without K and V, for blocks that are as small as they can be
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
        self.has_kv = bool(probed.shapes)
        self.state_bytes, self.continues_chunks = probed.state_bytes, probed.continues_chunks
        self.sequence_states: dict[int, SequenceStates] = {}  # by slot, of a model that has some
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
        plain_layers = {
            number: shape.plain_attention
            for number, shape in self.shapes.items()
            if shape.plain_attention is not None
            and (shape.num_kv_heads, shape.k_dim, shape.v_dim) == (*heads, heads[1])
        }
        self.kernels = make_kernel_layers(backend, *heads, plain_layers)
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
        states = self._states_of(batch.states, number, length)
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

    def _states_of(self, rows: StateRows | None, number: int, length: int) -> SequenceStates | None:
        """The states of the step's number-th sequence behind its first `length` tokens; None: the model has none. A
        sequence that begins, or begins again, has new ones."""
        if rows is None:
            return None
        slot = rows.slots[number]
        states = self.sequence_states[slot] if length else SequenceStates()
        assert states.length == length, "a state stands behind all tokens before it"
        self.sequence_states[slot] = states
        return states

    def _call(self, batch: ForwardBatch, tokens: slice, cache: PassingCache, rows: Tensor) -> Tensor:
        """Logits of some rows of these tokens, [R, vocab] float32."""
        input_ids = batch.input_ids[tokens]
        inputs: dict[str, Any] = {"input_ids": input_ids[None]}
        if batch.overlay is not None:
            x = self.model.get_input_embeddings()(batch.input_ids)
            x[batch.overlay.rows] = batch.overlay.values
            inputs = {"inputs_embeds": x[tokens][None]}
        length = None if self.is_ragged or not self.has_kv else cache.get_seq_length() + len(input_ids)
        logits = run_modules(self.model, self.parameters, inputs, batch.positions[tokens], length, rows, cache)
        if "logits_to_keep" not in self.parameters:
            self._head_inputs[-1] = self._head_inputs[-1][:, rows]
        self._head_inputs[-1] = self._head_inputs[-1][0]
        return logits


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


def check_library_sizes(config: dict[str, Any]) -> None:
    """Check the sizes of a parsed config.json, of a model that sees its text's part, under the names that the
    library has for them (n_layer is num_hidden_layers), before the library reads it: it lists layers one by one.
    Raises StartupError."""
    kind = config.get("model_type")
    names = CONFIG_MAPPING[kind].attribute_map if kind in CONFIG_MAPPING else {}
    try:
        for name, largest in LARGEST.items():
            for key in dict.fromkeys((name, names.get(name, name))):
                # others are the library's affair: a list of a size for each layer, 0 for what the model lacks
                if type(value := config.get(key)) is int and value:
                    check_size(key, value, largest)
    except ValueError as error:
        raise StartupError(f"config.json has a value of the wrong type or out of range: {error}") from None


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
