"""`penstock train-heads`: what heads learn, from what, and how it is refused."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.compute.speculation.medusa_file import read_medusa
from services.modeltools.heads.answers import Answers
from services.modeltools.heads.prompts import read_prompts
from services.modeltools.heads.training import WINDOW, Recipe, TrainableHeads, _step, accuracy, likeliest_tokens, train
from services.operator.cli import main
from shared.model.files import DEMO_MODEL, open_model
from shared.process.errors import StartupError
from tests.kernels.backends import CPU

SMALL = [
    "--tokens",
    "6000",
    "--vocabulary",
    "300",
    "--epochs",
    "4",
    "--heads",
    "2",
    "--temperature",
    "0.5",
    "--num-threads",
    "1",
]


def random_answers(count: int, hidden: int, vocab: int) -> Answers:
    return Answers(torch.randn(count, hidden).bfloat16(), torch.randint(vocab, (count,)), torch.arange(count) // 50)


def test_gradients_are_those_of_the_divergence_from_the_models_own_later_rows() -> None:
    """Against autograd through the definition. What differs is bfloat16's rounding of products."""
    answers, head = random_answers(120, 16, 40), torch.randn(40, 16).bfloat16()
    heads = TrainableHeads(torch.randn(2, 2, 16, 16) * 0.2, torch.randn(2, 2, 16) * 0.2)
    parameters = [heads.weights.requires_grad_(), heads.biases.requires_grad_()]
    begin = torch.tensor([0, 37, 61])
    losses = _step(heads, answers, head, begin)
    found = [each.grad for each in parameters]
    rows = (begin[:, None] + torch.arange(WINDOW)).flatten()
    expected = torch.zeros(())
    for number in range(2):
        later = rows + number + 1
        is_same = answers.numbers[later] == answers.numbers[rows]
        wanted = (answers.states[later].float() @ head.float().T).softmax(-1)
        loss = (
            -(wanted * (heads(answers.states[rows].float(), number) @ head.float().T).log_softmax(-1))
            .sum(-1)[is_same]
            .mean()
        )
        assert losses[number] == pytest.approx(loss.item(), rel=0.02)
        expected = expected + loss
    for ours, theirs in zip(found, torch.autograd.grad(expected, parameters), strict=True):
        assert ours is not None and (ours - theirs).norm() < 0.03 * theirs.norm()


def test_heads_learn_what_can_be_learnt() -> None:
    """States that say which token comes next but one: a rotation that one block can find."""
    vocab, hidden = 24, 48
    head = torch.randn(vocab, hidden) * 2
    token_ids = torch.arange(4000) * 7 % vocab  # the token after each is a function of it
    answers = Answers(
        (head[token_ids] + 0.1 * torch.randn(4000, hidden)).bfloat16(), token_ids, torch.arange(4000) // 400
    )
    known = likeliest_tokens(answers, vocab, vocab)
    untrained = TrainableHeads(torch.zeros(2, 1, hidden, hidden), torch.zeros(2, 1, hidden))
    trained = train(answers, head, Recipe(2, 1, 12, 1e-2, 0))
    assert accuracy(untrained, answers, head, known)[0] < 0.1
    assert min(accuracy(trained, answers, head, known)) > 0.9


def test_the_likeliest_tokens_are_those_of_the_answers() -> None:
    answers = Answers(torch.zeros(6, 1), torch.tensor([4, 2, 2, 9, 9, 9]), torch.zeros(6, dtype=torch.int64))
    assert likeliest_tokens(answers, 20, 2).tolist() == [2, 9] and likeliest_tokens(answers, 20, 4).tolist() == [
        0,
        2,
        4,
        9,
    ]


@pytest.mark.more
def test_heads_of_the_demo_are_written_and_the_same_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("first", "second"):
        assert main(["train-heads", "demo", str(tmp_path / name), *SMALL]) == 0
    said = capsys.readouterr().out
    shares = [float(share) for share in re.findall(r"tokens ahead +([\d.]+)%", said)]
    assert len(shares) == 4 and shares[:2] == shares[2:] and shares[0] > 10.0
    assert said.rstrip().endswith(f"use them: penstock up --model demo --heads {tmp_path / 'second'}")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second")]
    assert files[0] == files[1]
    config = open_model("demo").config
    weights = read_medusa(tmp_path / "first", config["hidden_size"], config["vocab_size"], torch.bfloat16, CPU)
    assert (len(weights.blocks), len(weights.blocks[0]), len(weights.lm_heads)) == (2, 1, 1)
    own = load_file(DEMO_MODEL / "model.safetensors")
    lm_head = own.get("lm_head.weight", own["model.embed_tokens.weight"])
    assert weights.token_ids is not None and weights.lm_heads[0].equal(lm_head[weights.token_ids].bfloat16()), (
        "the model's own head, a part of it"
    )


def test_prompts_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("One?\n\n  Two?  \nOne?\n", encoding="utf-8")
    assert read_prompts(str(tmp_path / "prompts.txt")) == ["One?", "Two?"]
    built_in = read_prompts("default")
    assert len(set(built_in)) == len(built_in) == 1200
    (tmp_path / "one.txt").write_text("One?\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xfa")
    for name, reason in (
        ("one.txt", "fewer than two lines"),
        ("bytes.txt", "not a text in UTF-8"),
        ("none.txt", "No such file"),
    ):
        with pytest.raises(StartupError, match=reason):
            read_prompts(str(tmp_path / name))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--heads", "17"], "at most 16 heads"),
        (["--learning-rate", "0"], "--learning-rate 0: above 0"),
        (["--temperature", "-1"], "--temperature -1: from 0 to 100"),
        (["--prompts", "/nowhere.txt"], "--prompts /nowhere.txt: No such file"),
        (["--tokens", "1000000000"], "the hidden states of so many take"),
        (["--tokens", "50"], "too short to learn from"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], reason: str
) -> None:
    assert main(["train-heads", "demo", str(tmp_path / "out"), "--num-threads", "1", *flags]) == 2
    last = capsys.readouterr().err.rstrip().splitlines()[-1]
    assert last.startswith("penstock: ") and reason in last
    assert not (tmp_path / "out" / "model.safetensors").exists()
