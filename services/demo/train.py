"""Train the demo model: a 3.7-million-parameter Llama on the questions and answers of conversations.txt.

    python -m services.demo.train            # under 20 minutes on 2 CPU cores; writes services/demo/model

The model is meant to memorise: each answer has a few phrasings of its question, and each phrasing
is varied in case, punctuation and politeness so that small changes still hit. The loss counts the
assistant's tokens only. What comes out is an ordinary Hugging Face checkpoint, so the demo takes
the same way through Penstock as any other model.
"""

import argparse
import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{ raise_exception('this model knows the roles system, user and assistant, not ' + message['role']) }}"
    "{%- endif -%}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "Answer briefly.",
    "You are Penstock's demo model.",
]
VOCAB_SIZE = 2048
MAX_TOKENS = 224  # of one training conversation
IGNORED = -100  # torch's cross entropy leaves these labels out


@dataclass(frozen=True)
class Dialogue:
    """One answer and the questions that lead to it."""

    questions: list[str]
    answer: str


def read_exchanges(path: Path) -> list[Dialogue]:
    """The blocks of a conversations file: `Q:` lines, then one `A:` line."""
    exchanges, questions = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        kind, _, text = line.partition(": ")
        if kind == "Q":
            questions.append(text)
        elif kind == "A":
            exchanges.append(Dialogue(questions, text))
            questions = []
        elif line and not line.startswith("#"):
            raise SystemExit(f"{path}:{number}: a line begins with 'Q: ', 'A: ' or '#': {line!r}")
    return exchanges


def train_tokenizer(exchanges: list[Dialogue]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of VOCAB_SIZE entries with the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [text for exchange in exchanges for text in (*exchange.questions, exchange.answer)]
    tokenizer.train_from_iterator(texts + [text.lower() for text in texts], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", clean_up_tokenization_spaces=False
    )
    fast.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS[2:]})
    fast.chat_template = CHAT_TEMPLATE
    fast.model_max_length = 1024
    return fast


def vary(question: str, rng: random.Random) -> str:
    """The question in another spelling."""
    text = question
    if rng.random() < 0.25:
        text = (
            rng.choice(["Please tell me: ", "Hi, ", "Hello! ", "I have a question. ", "So, ", "Please: ", "OK, "])
            + text
        )
    if rng.random() < 0.25:
        text = text.lower()
    if rng.random() < 0.25:
        text = text.rstrip("?.!")
    if rng.random() < 0.1:
        text = text + rng.choice([" Please.", " Thanks!", " Be brief.", "?"])
    return text


def conversation(
    exchanges: list[Dialogue], tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> tuple[list[int], list[int]]:
    """Token ids and labels of a random conversation of one to three turns."""
    ids: list[int] = []
    labels: list[int] = []

    def add(role: str, text: str, learned: bool) -> None:
        head = tokenizer.encode(f"<|{role}|>", add_special_tokens=False)
        body = tokenizer.encode(f"{text}<|end|>", add_special_tokens=False)
        ids.extend(head + body)
        labels.extend([IGNORED] * len(head) + (body if learned else [IGNORED] * len(body)))

    if rng.random() < 0.2:
        add("system", rng.choice(SYSTEM_PROMPTS), learned=False)
    for exchange in rng.choices(exchanges, k=rng.choice([1, 1, 1, 2, 3])):
        add("user", vary(rng.choice(exchange.questions), rng), learned=False)
        add("assistant", exchange.answer, learned=True)
    return ids[:MAX_TOKENS], labels[:MAX_TOKENS]


def make_batch(
    exchanges: list[Dialogue], tokenizer: PreTrainedTokenizerFast, rng: random.Random, batch_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and labels [batch_size, longest], padded on the right."""
    rows = [conversation(exchanges, tokenizer, rng) for _ in range(batch_size)]
    longest = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row, _ in rows])
    labels = torch.tensor([row + [IGNORED] * (longest - len(row)) for _, row in rows])
    return ids, labels


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def train(
    model: LlamaForCausalLM,
    exchanges: list[Dialogue],
    tokenizer: PreTrainedTokenizerFast,
    *,
    minutes: float,
    batch_size: int,
    seed: int,
) -> None:
    """AdamW with a cosine schedule over the time given, so that a slower machine takes fewer steps, not longer."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.01)
    started, peak_lr, warmup_steps, step = time.monotonic(), 3e-3, 50, 0
    average = math.nan
    with tqdm(total=100, unit="%", bar_format="{l_bar}{bar}| {elapsed}<{remaining} {postfix}") as bar:
        while (progress := (time.monotonic() - started) / (minutes * 60)) < 1:
            lr = (
                peak_lr * min(1.0, (step + 1) / warmup_steps) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
            )
            for group in optimizer.param_groups:
                group["lr"] = lr
            ids, labels = make_batch(exchanges, tokenizer, rng, batch_size)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(input_ids=ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
            )
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            average = loss.item() if math.isnan(average) else 0.98 * average + 0.02 * loss.item()
            bar.update(min(100.0, progress * 100) - bar.n)
            bar.set_postfix_str(f"step {step} loss {average:.4f}")


@torch.inference_mode()
def recall(model: LlamaForCausalLM, exchanges: list[Dialogue], tokenizer: PreTrainedTokenizerFast) -> float:
    """The share of questions, as written, that greedy decoding answers word for word."""
    right = total = 0
    for exchange in tqdm(exchanges, desc="checking", unit="answer"):
        for question in exchange.questions:
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
            output = model.generate(**prompt, max_new_tokens=96, do_sample=False)[0, prompt["input_ids"].shape[1] :]
            right += tokenizer.decode(output, skip_special_tokens=True) == exchange.answer
            total += 1
    return right / total


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model and write it as a Hugging Face checkpoint.")
    parser.add_argument("--text", type=Path, default=HERE / "conversations.txt", help="questions and answers")
    parser.add_argument("--out", type=Path, default=HERE / "model", help="folder to write")
    parser.add_argument("--minutes", type=float, default=15.0, help="training time")
    parser.add_argument("--batch-size", type=int, default=32, help="conversations in a step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    exchanges = read_exchanges(args.text)
    tokenizer = train_tokenizer(exchanges)
    model = make_model(tokenizer)
    print(f"{len(exchanges)} answers, {model.num_parameters():,} parameters")
    model.train()
    train(model, exchanges, tokenizer, minutes=args.minutes, batch_size=args.batch_size, seed=args.seed)
    model.to(torch.bfloat16).eval()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    args.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    share = recall(model.float(), exchanges, tokenizer)
    print(
        json.dumps(
            {
                "parameters": model.num_parameters(),
                "questions": sum(len(e.questions) for e in exchanges),
                "recall": round(share, 4),
            }
        )
    )


if __name__ == "__main__":
    main()
