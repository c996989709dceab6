"""A model whose answers are a script's. It stands where a decoder stands: batches, paged cache,
masks and sampling are compute's own.

Its cache holds the tokens themselves, so it reads its context back through the block tables, as attention does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from services.compute.backends.backend import Workspace
from services.compute.backends.torch.backend import TorchBackend
from services.compute.models.decoder import ForwardBatch
from services.modeltools.make_model import SHAPES, tensor_sizes, write_config
from services.modeltools.out_folder import open_out_folder, write_model
from shared.model.files import DEMO_MODEL
from tests.clients.scripted.script import Message, Script

MAX_MODEL_LEN = 262_144  # an agent's first request is some 60,000 tokens of the demo's small vocabulary
UNLIKELY = -1e4
MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")  # tokens for infilling, behind the demo's own
TEMPLATE = """\
{%- if tools -%}
{{ '<|system|><tools>' }}
{%- for tool in tools -%}{{ '\\n' + (tool | tojson) }}{%- endfor -%}
{{ '\\n</tools><|end|>' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ '<|assistant|>' + (message.content or '') }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor -%}
{%- elif message.role == 'tool' -%}
{{ '<|user|><tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else -%}
{{ ('<|user|>' if message.role == 'user' else '<|system|>') + (message.content or '') }}
{%- endif -%}
{{ '<|end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""  # noqa: E501


@dataclass(frozen=True, slots=True)
class ScriptedConfig:
    """A config for scheduler and cache: a key of one number for each token."""

    vocab_size: int
    kv_heads: tuple[tuple[int, int], ...] = ((1, 1),)


class ScriptedModel:
    implementation = "scripted"
    is_row_invariant = True
    splits_prompts = takes_segments = has_kv = True
    finds_slots = False
    longest_text = None
    state_bytes = 0

    def __init__(self, vocab_size: int, next_token: Callable[[np.ndarray], int]) -> None:
        """next_token: of a sequence's tokens [n] the one that follows."""
        self.config = ScriptedConfig(vocab_size)
        self.backend = TorchBackend(torch.float32, torch.device("cpu"))  # float32 holds every token id
        self.next_token = next_token

    def workspace(self, num_tokens: int, num_logits: int, max_model_len: int) -> Workspace:  # noqa: ARG002
        return Workspace(0, num_logits * self.config.vocab_size * 4)

    def plan(self, batch: ForwardBatch, block_size: int) -> int:  # noqa: ARG002
        return block_size

    def forward(self, batch: ForwardBatch, plan: int, kv_layers: Sequence[torch.Tensor]) -> torch.Tensor:
        """Write the step's tokens into the cache. Returns which token follows each, [T] int64,
        where the batch asks for that.
        """
        keys = kv_layers[0][0]  # [num_blocks, 1, block_size, 1]
        keys[batch.slot_mapping // plan, 0, batch.slot_mapping % plan, 0] = batch.input_ids.to(keys.dtype)
        following = torch.zeros_like(batch.input_ids)
        ends = list(accumulate(batch.query_lens))
        for row in batch.logit_rows.tolist():
            number = next(at for at, end in enumerate(ends) if row < end)
            length = batch.context_lens[number] - (ends[number] - 1 - row)
            blocks = list(batch.block_tables[number][: -(-length // plan)])
            following[row] = self.next_token(keys[blocks].flatten()[:length].to(torch.int64).numpy())
        return following

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """All mass on the token that follows."""
        logits = torch.full((len(rows), self.config.vocab_size), UNLIKELY)
        logits[torch.arange(len(rows)), hidden[rows]] = 0.0
        return logits

    def states(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return hidden[rows, None].float()


def follow(script: Script, tokenizer: Tokenizer) -> Callable[[np.ndarray], int]:
    """A function of a conversation's tokens: the next token of the script's answer to it, or the end."""
    special = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    role_by_token_id = {special[f"<|{role}|>"]: role for role in ("system", "user", "assistant")} | {
        special[MARKS[-1]]: "assistant"
    }
    end = special["<|end|>"]

    @lru_cache(maxsize=64)
    def answer(prompt: bytes) -> list[int]:
        token_ids = np.frombuffer(prompt, np.int64)
        begins = [*np.flatnonzero(np.isin(token_ids, list(role_by_token_id))).tolist(), len(token_ids)]
        messages = [
            Message(role_by_token_id[int(token_ids[begin])], tokenizer.decode(token_ids[begin + 1 : until].tolist()))
            for begin, until in zip(begins, begins[1:], strict=False)
        ]
        return [*tokenizer.encode(script.answer(messages[:-1]), add_special_tokens=False).ids, end]

    def next_token(token_ids: np.ndarray) -> int:
        begins = np.flatnonzero(np.isin(token_ids, list(role_by_token_id)))
        if not len(begins):
            return end
        begin = int(begins[-1]) + 1
        said = answer(token_ids[:begin].tobytes())
        return said[min(len(token_ids) - begin, len(said) - 1)]

    return next_token


def make_model(out: Path) -> None:
    """A checkpoint's folder for it: the demo's tokenizer, a long window, a template that knows
    tools. The weights are read by nobody.
    """
    tiny = SHAPES["tiny"]
    shape = replace(tiny, max_position_embeddings=MAX_MODEL_LEN, vocab_size=tiny.vocab_size + len(MARKS))
    open_out_folder(out, force=True)
    write_model(
        out,
        {name: torch.zeros(size) for name, size in tensor_sizes(shape)},
        lambda: write_config(out, shape, "float32"),
    )
    (out / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    tokenizer.add_special_tokens([*MARKS])
    tokenizer.save(str(out / "tokenizer.json"))
