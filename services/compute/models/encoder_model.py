"""Models that read a text in both directions and write none (BERT and its kin): transformers' own
modules, for embeddings.

There is no cache: every token sees all others, so a text is computed whole, in one step, each in a
forward pass of its own. That is what makes its vector the same in any company.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from services.compute.backends.backend import Backend, Workspace
from services.compute.backends.torch.backend import TorchBackend
from services.compute.models.decoder import ForwardBatch
from services.compute.models.library_errors import first_line
from shared.process.errors import StartupError


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The configuration that scheduler and cache need: the cache holds nothing, and is as small as
    it can be."""

    vocab_size: int
    kv_heads: tuple[tuple[int, int], ...] = ((1, 8),)


class EncoderModel:
    """An AutoModel as an executor."""

    implementation = "transformers (encoder)"
    splits_prompts = takes_segments = False
    is_row_invariant = finds_slots = has_kv = False
    state_bytes = 0

    def __init__(self, model: Any, backend: Backend) -> None:
        self.model = model
        self.backend = backend
        self.config = EncoderConfig(model.config.vocab_size)

    @property
    def longest_text(self) -> int | None:
        """The number of the model's positions: some models leave out those up to the padding
        token's id."""
        config = self.model.config
        length = getattr(config, "max_position_embeddings", None)
        embeddings = getattr(self.model.base_model, "embeddings", None)
        is_offset = hasattr(embeddings, "create_position_ids_from_input_ids") or hasattr(
            embeddings, "create_position_ids_from_inputs_embeds"
        )
        offset = config.pad_token_id + 1 if is_offset and config.pad_token_id is not None else 0
        return None if length is None else int(length) - offset

    def workspace(self, num_tokens: int, num_logits: int, max_model_len: int) -> Workspace:  # noqa: ARG002
        """Nothing is reserved: what the library's modules take is their own affair."""
        return Workspace(0, 0)

    def plan(self, batch: ForwardBatch, block_size: int) -> list[int]:  # noqa: ARG002
        """The lengths of the step's texts."""
        return batch.query_lens

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, plan: list[int], kv_layers: Sequence[Tensor]) -> Tensor:  # noqa: ARG002
        """Returns the last hidden states of each token, [T, hidden]."""
        return torch.cat(
            [self.model(input_ids=text[None]).last_hidden_state[0] for text in torch.split(batch.input_ids, plan)]
        )

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """No logits, for nothing is sampled: zeros [R, vocab] float32."""
        return hidden.new_zeros((len(rows), self.config.vocab_size), dtype=torch.float32)

    def states(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """The same as Decoder.states."""
        return hidden[rows].float()


def is_encoder(config: dict[str, Any], folder: Path) -> bool:
    """Whether config.json is of a model that reads in both directions: its architecture fills in
    masked words, or is the bare model below such a one; or it says so (EmbeddingGemma)."""
    names = config.get("architectures") or []
    if any(
        part in str(name) for name in names for part in ("CausalLM", "LMHead", "ConditionalGeneration")
    ) or config.get("is_decoder"):
        return False
    try:
        found = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception:  # any error that config.json leads to: the model's loader reports it
        return False
    is_bidirectional = getattr(found, "use_bidirectional_attention", None) in (True, "all")
    return (is_bidirectional or type(found) in AutoModelForMaskedLM._model_mapping) and not found.is_encoder_decoder


class ClassifierModel(EncoderModel):
    """An AutoModelForSequenceClassification as an executor: the state of each of a text's tokens is
    the head's output for the text."""

    implementation = "transformers (classifier)"

    def __init__(self, model: Any, backend: TorchBackend, separator: int | None) -> None:
        """separator: the token that ends the first text of a pair, where the model tells the two
        apart by types of tokens."""
        super().__init__(model, backend)
        self.separator = separator

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, plan: list[int], kv_layers: Sequence[Tensor]) -> Tensor:  # noqa: ARG002
        """Returns the head's output for its text, once for each token, [T, labels]."""
        return torch.cat(
            [self._classify(text[None]).expand(len(text), -1) for text in torch.split(batch.input_ids, plan)]
        )

    def _classify(self, input_ids: Tensor) -> Tensor:
        """input_ids: [1, T]. Returns [1, labels]."""
        logits: Tensor = self.model(input_ids=input_ids, **self._types(input_ids)).logits
        return logits

    def _types(self, input_ids: Tensor) -> dict[str, Tensor]:
        """0 for tokens up to the first separator, 1 for those behind it, of models that know two
        types."""
        if self.separator is None or getattr(self.model.config, "type_vocab_size", 0) < 2:
            return {}
        ends = (input_ids == self.separator).long()
        return {"token_type_ids": (ends.cumsum(1) - ends).clamp(max=1)}


def load_classifier(folder: Path, backend: TorchBackend) -> ClassifierModel:
    """Raises StartupError, naming a tensor that is missing."""
    model = _load(AutoModelForSequenceClassification, folder, backend)
    if model.config.pad_token_id is None:
        # a decoder's head reads the last token that is no padding: all are
        model.config.pad_token_id = model.config.vocab_size
    return ClassifierModel(model, backend, AutoTokenizer.from_pretrained(folder, local_files_only=True).sep_token_id)


def load_encoder(folder: Path, backend: TorchBackend) -> EncoderModel:
    """Raises StartupError, naming a tensor that is missing."""
    return EncoderModel(_load(AutoModel, folder, backend), backend)


def load_gguf_encoder(folder: Path, backend: Backend, load: Callable[..., Any]) -> EncoderModel:
    """folder: of config.json; load: makes the modules with the file's weights. Raises StartupError, naming
    a tensor that is missing."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return EncoderModel(load(config, auto_class=AutoModel), backend)


def _load(kind: Any, folder: Path, backend: TorchBackend) -> Any:
    logging.set_verbosity_error()
    try:
        model, info = kind.from_pretrained(
            folder,
            dtype=backend.dtype,
            attn_implementation="eager",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            low_cpu_mem_usage=True,
            output_loading_info=True,
        )
    except Exception as error:  # of safetensors, of the model's own code, of the library's checks
        raise StartupError(f"{folder}: transformers can't load the model: {first_line(error)}") from None
    # a vector that nothing here asks for
    of_bare = (name for name in info["missing_keys"] if kind is not AutoModel or not name.startswith("pooler."))
    if missing := sorted(of_bare):
        raise StartupError(f"{folder}: the checkpoint has no tensor {missing[0]}")
    return model.eval().to(backend.device)
