"""Training of Medusa heads: residual blocks between the model's last hidden state and its own head,
which stays as it is.

Each head learns the model's own distribution of a later token: at each position of an answer, the
one that the model had there when it had come there (Cai et al., "Medusa: Simple LLM Inference
Acceleration Framework with Multiple Decoding Heads", 2024, section 2.3, without sampling noise).
Only the likeliest tokens take part, so head and draft are cheap.
"""

import math
import sys
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from tqdm import tqdm

from services.modeltools.heads.answers import Answers

WINDOW, WINDOWS_AT_ONCE = 32, 32  # consecutive tokens; windows of a step
WARM_UP = 0.05  # of the steps
WEIGHT_DECAY = 0.01


@dataclass(frozen=True, slots=True)
class Recipe:
    """How heads are trained."""

    num_heads: int
    num_layers: int  # residual blocks of a head
    epochs: int
    learning_rate: float
    seed: int


@dataclass(slots=True)
class TrainableHeads:
    """Heads in training."""

    weights: Tensor  # [heads, layers, hidden, hidden] float32
    biases: Tensor  # [heads, layers, hidden] float32

    def __call__(self, x: Tensor, head: int) -> Tensor:
        """x: [R, hidden] float32. Returns [R, hidden], what the LM head takes."""
        for weight, bias in zip(self.weights[head], self.biases[head], strict=True):
            x = x + silu(linear(x, weight, bias))
        return x


def likeliest_tokens(answers: Answers, vocab_size: int, count: int) -> Tensor:
    """The most frequent tokens of the answers, ids rising: [count] int64."""
    counts = torch.bincount(answers.token_ids, minlength=vocab_size)
    found: Tensor = counts.argsort(descending=True, stable=True)[:count].sort().values
    return found


def train(answers: Answers, lm_head: Tensor, recipe: Recipe) -> TrainableHeads:
    """lm_head: [V, hidden], the model's head for the V tokens that take part."""
    hidden = lm_head.shape[1]
    size = (recipe.num_heads, recipe.num_layers, hidden)
    heads = TrainableHeads(torch.zeros(*size, hidden), torch.zeros(size))
    parameters = [heads.weights.requires_grad_(), heads.biases.requires_grad_()]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=WEIGHT_DECAY)
    generator = torch.Generator().manual_seed(recipe.seed)
    starts = torch.arange(0, len(answers.token_ids) - WINDOW - recipe.num_heads + 1, WINDOW)
    num_steps = recipe.epochs * math.ceil(len(starts) / WINDOWS_AT_ONCE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step / num_steps))
    head = lm_head.bfloat16()
    with tqdm(total=num_steps, desc="training", unit="step", file=sys.stderr, mininterval=0.5) as bar:
        for epoch in range(recipe.epochs):
            offset = int(torch.randint(WINDOW, (1,), generator=generator)) if epoch else 0
            order = starts[torch.randperm(len(starts), generator=generator)]
            for part in torch.split(order, WINDOWS_AT_ONCE):
                begin = (part + offset).clamp(max=int(starts[-1]))
                losses = _step(heads, answers, head, begin)
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                bar.set_postfix_str(" ".join(f"{loss:.3f}" for loss in losses), refresh=False)
                bar.update()
    for each in parameters:
        each.requires_grad_(False)
    return heads


def _rate(done: float) -> float:
    """The learning rate's share: it rises, and falls along a cosine."""
    return done / WARM_UP if done < WARM_UP else 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))


def _step(heads: TrainableHeads, answers: Answers, head: Tensor, begin: Tensor) -> list[float]:
    """Add to the gradients what windows say that begin at some tokens. Returns each head's loss, in
    nats a token."""
    num_heads = len(heads.weights)
    rows = begin[:, None] + torch.arange(WINDOW)
    longer = begin[:, None] + torch.arange(WINDOW + num_heads)
    targets = linear(answers.states[longer.flatten()], head).float().softmax(-1).view(*longer.shape, -1)
    x = answers.states[rows.flatten()].float()
    losses = []
    for number in range(num_heads):
        wanted = targets[:, number + 1 : number + 1 + WINDOW].flatten(0, 1)
        # not of the next answer
        counts = (answers.numbers[rows + number + 1] == answers.numbers[rows]).flatten().float()
        y = heads(x, number)
        with torch.no_grad():
            logits = linear(y.bfloat16(), head).float()
            total = logits.logsumexp(-1, keepdim=True)
            share = counts / counts.sum().clamp(min=1)
            losses.append(float(((total.squeeze(-1) - (wanted * logits).sum(-1)) * share).sum()))
            error = (logits - total).exp_().sub_(wanted).mul_(share[:, None])
            gradient = error.bfloat16() @ head
        torch.autograd.backward(y, gradient.float())
    return losses


@torch.inference_mode()
def accuracy(heads: TrainableHeads, answers: Answers, lm_head: Tensor, token_ids: Tensor) -> list[float]:
    """The share of each head's likeliest tokens that are the answers' own. token_ids: [V], those
    that take part."""
    head, num_heads = lm_head.bfloat16(), len(heads.weights)
    found, total = [0] * num_heads, [0] * num_heads
    for rows in torch.split(torch.arange(len(answers.token_ids)), WINDOW * WINDOWS_AT_ONCE):
        for number in range(num_heads):
            at = rows[rows + number + 1 < len(answers.token_ids)]
            at = at[answers.numbers[at + number + 1] == answers.numbers[at]]
            guesses = token_ids[linear(heads(answers.states[at].float(), number).bfloat16(), head).argmax(-1)]
            found[number] += int((guesses == answers.token_ids[at + number + 1]).sum())
            total[number] += len(at)
    return [hits / max(count, 1) for hits, count in zip(found, total, strict=True)]
