"""Tokenizers made of GGUF metadata against those that the metadata were taken from."""

import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from shared.model.gguf.reader import GgufHead, read_head
from shared.model.gguf.tokenizer import SPLITS, make_tokenizer, make_tokenizer_config
from shared.process.errors import StartupError
from tests.examples import examples

TEXTS = [
    "Hello world",
    "  leading  spaces\n\n\tand tabs   \r\n",
    "def f(x):\n    return x**2 + 1234567.89  # ünïcödé",
    "你好，世界！ 日本語 한국어 العربية 🤖👩‍👩‍👧‍👦",
    "it's we'll I'M DON'T",
    "<|im_start|>user\nHi<|im_end|>\n",
    "\x00\x01\x7f\ufeff\u200b",
    "a" * 100,
    " " * 37 + "x",
    "\n" * 20,
    "<0x0A> <s> </s>",
    "1 22 333 4444 55555",
    "e\u0301 \u00e9",
    "",
    " ",
    "▁",
    "Café naïve ½ ² ①",
]
CORPUS = [
    Path(__file__).read_text(),
    *TEXTS * 3,
    *(f"{number} times {number * 37} is {number**2 * 7}, isn't it?\n" for number in range(300)),
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
any_text = (
    st.text(max_size=60)
    | st.text("ab 1'\n.é<|>", max_size=60)
    | st.lists(st.sampled_from([*SPECIALS, " ", "x", "\n", "<s>"]), max_size=8).map("".join)
)


def byte_level(pre: str) -> Tokenizer:
    """A trained tokenizer that splits as the models of that name do, built of the library's own parts."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    tokenizer.decoder = decoders.ByteLevel()
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = {
        "gpt-2": gpt2,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2]),
        "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES]),
        "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"), BYTES]),
    }[pre]
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=900,
            special_tokens=SPECIALS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def sentencepiece(add_prefix: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if add_prefix else replace
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex(r"▁?[^▁]+|▁+"), "isolated"
    )  # for training only: a merge never crosses a word
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=1200, special_tokens=specials, show_progress=False)
    )
    trained = json.loads(tokenizer.to_str())
    trained["pre_tokenizer"] = None
    trained["added_tokens"] = trained["added_tokens"][:3]
    return Tokenizer.from_str(json.dumps(trained))


TEMPLATE = "{{ bos_token }}{{ messages[0].content }}"


def to_gguf(
    tokenizer: Tokenizer, path: Path, *, pre: str, scores: bool = False, template: Any = TEMPLATE, **flags: bool
) -> GgufHead:
    """A file with the tokenizer's metadata only."""
    state = json.loads(tokenizer.to_str())
    tokens = sorted(state["model"]["vocab"], key=state["model"]["vocab"].get)
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama" if scores else "gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    special = {token["content"]: 3 for token in state["added_tokens"]}
    writer.add_token_types([special.get(token, 6 if token.startswith("<0x") and scores else 1) for token in tokens])
    if scores:
        ranks = {"".join(merge): -float(number) for number, merge in enumerate(state["model"]["merges"])}
        writer.add_token_scores([ranks.get(token, -1e6) for token in tokens])
    else:
        writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
    for name, number in (("bos", 1), ("eos", 2), ("unk", 0)):
        getattr(writer, f"add_{name}_token_id")(number)
    for name, flag in flags.items():
        getattr(writer, f"add_{name}")(flag)
    writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return read_head(path)


def merge_by_score(head: GgufHead, text: str) -> list[int]:
    """SentencePiece's BPE as it is defined: of all neighbours that make a token together, those
    with the best score become one, the leftmost first.
    """
    tokens, scores = head.metadata["tokenizer.ggml.tokens"], head.metadata["tokenizer.ggml.scores"]
    kinds = head.metadata["tokenizer.ggml.token_type"]
    number_of = {token: number for number, token in enumerate(tokens) if kinds[number] == 1}
    pieces = list(text)
    while True:
        found = [
            (-scores[number_of[pair]], at)
            for at in range(len(pieces) - 1)
            if (pair := pieces[at] + pieces[at + 1]) in number_of
        ]
        if not found:
            break
        _, at = min(found)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    ids = []
    for piece in pieces:
        ids += (
            [number_of[piece]] if piece in number_of else [tokens.index(f"<0x{byte:02X}>") for byte in piece.encode()]
        )
    return ids


def build(head: GgufHead) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(make_tokenizer(head)))


@cache
def _built(path: Path) -> Tokenizer:
    return build(read_head(path))


def build_once(head: GgufHead) -> Tokenizer:
    return _built(head.path)


@pytest.fixture(scope="module", params=["gpt-2", "smollm", "llama-bpe", "qwen2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    original = byte_level(request.param)
    head = to_gguf(original, tmp_path_factory.mktemp("gguf") / "model.gguf", pre=request.param, add_bos_token=False)
    return original, build(head)


@pytest.fixture(scope="module", params=[True, False])
def sentencepiece_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GgufHead:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return to_gguf(
        sentencepiece(request.param),
        path,
        pre="default",
        scores=True,
        add_bos_token=False,
        add_space_prefix=request.param,
    )


@examples(150)
@given(text=any_text)
def test_byte_level_tokens_are_the_originals(pair: tuple[Tokenizer, Tokenizer], text: str) -> None:
    original, made = pair
    for each in (*TEXTS, text):
        ids = original.encode(each).ids
        assert made.encode(each).ids == ids
        assert made.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)


@examples(150)
@given(text=any_text)
def test_sentencepiece_tokens_follow_from_the_scores(sentencepiece_file: GgufHead, text: str) -> None:
    made, prefix = (
        build_once(sentencepiece_file),
        "▁" if sentencepiece_file.metadata["tokenizer.ggml.add_space_prefix"] else "",
    )
    for each in (*TEXTS, text):
        plain = each.replace("<", "(")  # special tokens are found before anything is merged
        ids = made.encode(plain).ids
        assert ids == (merge_by_score(sentencepiece_file, prefix + plain.replace(" ", "▁")) if plain else [])
        assert made.decode(ids) == plain.replace("▁", " ")


def test_transformers_reads_the_same_and_renders_the_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    head = to_gguf(byte_level("smollm"), tmp_path / "model.gguf", pre="smollm", add_bos_token=True)
    for name, content in (
        ("tokenizer", make_tokenizer(head)),
        ("tokenizer_config", make_tokenizer_config(head)),
        ("config", {"model_type": "llama"}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    read, made = AutoTokenizer.from_pretrained(tmp_path), build(head)
    for text in TEXTS:
        assert read(text)["input_ids"] == made.encode(text).ids == [1, *made.encode(text, add_special_tokens=False).ids]
    assert read.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "<|im_start|>Hi"
    assert (read.bos_token, read.eos_token, read.unk_token) == tuple(SPECIALS[number] for number in (1, 2, 0))


def test_templates_that_have_names_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    named = [
        {"name": "default", "template": TEMPLATE},
        {"name": "tool_use", "template": "{{ tools[0].function.name }}"},
    ]
    head = to_gguf(byte_level("smollm"), tmp_path / "model.gguf", pre="smollm", template=named)
    for name, content in (
        ("tokenizer", make_tokenizer(head)),
        ("tokenizer_config", make_tokenizer_config(head)),
        ("config", {"model_type": "llama"}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    read, tool = (
        AutoTokenizer.from_pretrained(tmp_path),
        {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}},
    )
    assert read.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "<|im_start|>Hi"
    assert read.apply_chat_template([{"role": "user", "content": "Hi"}], tools=[tool], tokenize=False) == "add"


def test_added_tokens_are_found_whole_and_bos_is_where_the_file_wants_it(tmp_path: Path) -> None:
    original = byte_level("gpt-2")
    original.add_tokens([AddedToken("<think>", normalized=False)])
    head = to_gguf(byte_level("gpt-2"), tmp_path / "model.gguf", pre="gpt-2", add_bos_token=True, add_eos_token=True)
    metadata = dict(head.metadata)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<think>", "<think>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 4, 1]
    made = build(GgufHead(head.path, metadata, {}))
    number = len(metadata["tokenizer.ggml.tokens"]) - 2
    assert made.encode("a<think>b").ids == [1, *original.encode("a").ids, number, *original.encode("b").ids, 2]
    assert made.decode([number]) == "<think>", "not special: it is part of the answer's text"
    assert made.get_vocab_size() == number + 2, "a token that is there twice keeps its place"


@pytest.mark.parametrize(
    ("pre", "is_llama3"), [("llama-bpe", True), ("lfm2", True), ("dbrx", False), ("smaug-bpe", False)]
)
def test_names_that_split_alike_may_begin_and_merge_differently(pre: str, is_llama3: bool, tmp_path: Path) -> None:
    """As llama.cpp has it: ignore_merges and a BOS token are of Llama 3's own, and of some relatives."""
    made = make_tokenizer(to_gguf(byte_level("llama-bpe"), tmp_path / "model.gguf", pre=pre))
    assert made["model"]["ignore_merges"] == is_llama3 and (made["post_processor"] is not None) == is_llama3


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        (
            "deepseek-v3",
            "It's 12345 你好world!foo\n x",
            ["It", "'s", " ", "123", "45", " ", "你好", "world", "!foo", "\n", " x"],
        ),
        ("deepseek-coder", "a 123, é你好 b\n", ["a", " ", "1", "2", "3", ",", " é", "你好", " b", "\n"]),
        ("deepseek-llm", "a 12, é你好 b\n", ["a", " ", "1", "2", ",", " é", "你好", " b", "\n"]),
        ("seed-coder", "Don't 42!\n", ["Don", "'t", " ", "4", "2", "!", "\n"]),
        ("qwen2", "Don't 42!\n", ["Don", "'t", " ", "4", "2", "!\n"]),
    ],
)
def test_texts_are_cut_into_words_as_the_makers_do(pre: str, text: str, words: list[str], tmp_path: Path) -> None:
    made = build(to_gguf(byte_level("gpt-2"), tmp_path / "model.gguf", pre=pre))
    assert [text[begin:end] for _, (begin, end) in made.pre_tokenizer.pre_tokenize_str(text)] == words


@pytest.mark.parametrize(
    ("unknown", "token"), [(None, "<unk>"), (0, "<unk>"), (1, "<s>"), (10_000_000, None), ("<unk>", None)]
)
def test_the_unknown_token_is_that_of_the_file_or_the_first(
    unknown: Any, token: str | None, sentencepiece_file: GgufHead
) -> None:
    """The first is usual, and none is taken where no token has that number."""
    metadata = (
        sentencepiece_file.metadata
        if unknown is None
        else sentencepiece_file.metadata | {"tokenizer.ggml.unknown_token_id": unknown}
    )
    assert make_tokenizer(replace(sentencepiece_file, metadata=metadata))["model"]["unk_token"] == token


def test_a_token_of_megabytes_is_refused_at_once(sentencepiece_file: GgufHead) -> None:
    tokens = [*sentencepiece_file.metadata["tokenizer.ggml.tokens"], "ab" * 1_000_000]
    scores = [*sentencepiece_file.metadata["tokenizer.ggml.scores"], -1.0]
    kinds = [*sentencepiece_file.metadata["tokenizer.ggml.token_type"], 1]
    lists = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores, "tokenizer.ggml.token_type": kinds}
    with pytest.raises(StartupError, match=f"token {len(tokens) - 1} has 2000000 characters; at most 1024 are merged"):
        make_tokenizer(replace(sentencepiece_file, metadata=sentencepiece_file.metadata | lists))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.model", "rwkv", "'rwkv' is not supported"),
        ("tokenizer.ggml.pre", "unheard-of", "pre-tokenizer 'unheard-of' is not supported"),
        ("tokenizer.ggml.tokens", "one text", "not the list that it should be"),
        ("tokenizer.ggml.token_type", [1], "but types of 1"),
        ("tokenizer.ggml.merges", [3], "not the list"),
        ("tokenizer.ggml.merges", ["a unheard-of"], "is not of tokens"),
    ],
)
def test_what_can_not_be_a_tokenizer_is_named(key: str, value: Any, message: str, tmp_path: Path) -> None:
    head = to_gguf(byte_level("gpt-2"), tmp_path / "model.gguf", pre="gpt-2")
    with pytest.raises(StartupError, match=message):
        make_tokenizer(GgufHead(head.path, head.metadata | {key: value}, {}))


SCRIPTS = [
    *TEXTS,
    "हिन्दी में नमस्ते, தமிழ் ไทย বাংলা తెలుగు",
    "Ελληνικά Русский עברית ÀÉÎÕÜ ﬁ ŉ",
    "x = {'a': [1, 2.5e-10], \"b\": None}\r\n\tif x and not y: return 0xFF",
]


def check_ids(made: Tokenizer, original: Any) -> None:
    for text in SCRIPTS:
        assert made.encode(text, add_special_tokens=False).ids == original.encode(text, add_special_tokens=False), text


def test_marks_belong_to_words_of_qwen_3_5(tmp_path: Path) -> None:
    from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

    trained = byte_level("qwen2")
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"[\p{L}\p{M}]+|\p{N}|[^\p{L}\p{M}\p{N}]+"), "isolated"), BYTES]
    )
    trained.train_from_iterator(
        [*CORPUS, *SCRIPTS * 9],
        trainers.BpeTrainer(
            vocab_size=1500,
            special_tokens=SPECIALS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    state = json.loads(trained.to_str())["model"]
    original = Qwen3_5Tokenizer(state["vocab"], [tuple(each) for each in state["merges"]])
    original.add_special_tokens({"additional_special_tokens": SPECIALS})
    made = {pre: build(to_gguf(trained, tmp_path / f"{pre}.gguf", pre=pre)) for pre in ("qwen35", "qwen2")}
    check_ids(made["qwen35"], original)
    with pytest.raises(AssertionError):
        check_ids(made["qwen2"], original)


def test_gemma_4_lists_its_merges(sentencepiece_file: GgufHead) -> None:
    from transformers import GemmaTokenizer

    state = json.loads(build(sentencepiece_file).to_str())["model"]
    merges = [" ".join(each) for each in state["merges"]]
    listed = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_space_prefix": False,
    }
    made = build(GgufHead(sentencepiece_file.path, sentencepiece_file.metadata | listed, {}))
    original = GemmaTokenizer(
        state["vocab"], [tuple(each) for each in state["merges"]], bos_token="<s>", eos_token="</s>"
    )
    for text in SCRIPTS:
        plain = text.replace("<", "(")
        assert made.encode(plain, add_special_tokens=False).ids == original.encode(plain, add_special_tokens=False)


def wordpiece(is_cased: bool) -> tuple[dict[str, int], dict[str, Any]]:
    """A vocabulary for BertTokenizer, and the metadata that llama.cpp's converter makes of it."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trained = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.normalizer, trained.pre_tokenizer = (
        normalizers.BertNormalizer(lowercase=not is_cased),
        pre_tokenizers.BertPreTokenizer(),
    )
    trained.train_from_iterator(
        [*CORPUS, *SCRIPTS], trainers.WordPieceTrainer(vocab_size=900, special_tokens=specials, show_progress=False)
    )
    vocabulary = trained.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    marked = [token if token in specials else token[2:] if token.startswith("##") else "▁" + token for token in tokens]
    ids = dict(zip(("padding", "unknown", "cls", "seperator", "mask"), range(5), strict=True))
    return vocabulary, {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": [*marked, "▁[PAD900]"],  # where an embedding has more rows
        "tokenizer.ggml.token_type": [*(3 if token in specials else 1 for token in tokens), 5],
        **{f"tokenizer.ggml.{name}_token_id": number for name, number in ids.items()},
    }


@pytest.mark.parametrize("is_cased", [False, True])
def test_words_of_bert_are_cut_into_pieces(is_cased: bool, tmp_path: Path) -> None:
    from transformers import BertTokenizer

    vocabulary, metadata = wordpiece(is_cased)
    original = BertTokenizer(vocabulary, do_lower_case=not is_cased)
    made = build(GgufHead(tmp_path / "model.gguf", metadata, {}))
    for text in SCRIPTS:
        assert made.encode(text).ids == original.encode(text)
    pair = made.encode("Hello world", "it's")
    expected = original("Hello world", "it's")
    assert (pair.ids, pair.type_ids) == (expected["input_ids"], expected["token_type_ids"])


VOCABULARIES = Path(os.environ.get("PENSTOCK_TEST_VOCABULARIES", "") or "/nowhere")  # llama.cpp's folder `models`


@pytest.mark.parametrize("path", sorted(VOCABULARIES.glob("ggml-vocab-*.gguf.inp")), ids=lambda path: path.name)
def test_published_vocabularies_give_the_tokens_of_the_makers_tokenizers(path: Path) -> None:
    """llama.cpp has the vocabularies of some models, texts, and what the makers' tokenizers make of these."""
    head = read_head(path.with_suffix(""))
    if (
        head.metadata["tokenizer.ggml.model"] not in ("gpt2", "llama")
        or head.metadata.get("tokenizer.ggml.pre", "default") not in SPLITS
    ):
        pytest.skip("of a kind that is not read")
    made = build(head)
    texts = path.read_bytes().decode().split("\n__ggml_vocab_test__\n")[:-1]
    expected = [[int(number) for number in line.split()] for line in path.with_suffix(".out").read_text().splitlines()]
    assert [made.encode(text, add_special_tokens=False).ids for text in texts] == expected[: len(texts)]
