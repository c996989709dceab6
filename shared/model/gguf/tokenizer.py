"""GGUF metadata as tokenizer.json and tokenizer_config.json, which the `tokenizers` library and
transformers read.

Three kinds: byte-level BPE with merges (tokenizer.ggml.model "gpt2"), split into words as
tokenizer.ggml.pre says; SentencePiece's BPE ("llama"), whose order of merges follows from the
tokens' scores; and BERT's WordPiece ("bert").
"""

import re
from dataclasses import dataclass, replace
from typing import Any

from shared.model.gguf.reader import GgufHead
from shared.process.errors import StartupError

SPACE = "▁"  # SentencePiece's
UPPER_CASE = re.compile("[A-Z]")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # a token's type
MAX_TOKEN = 1024  # characters that are made by merging: each of a token's cuts is tried
# characters looked at to find the merges; 262,144 tokens of 8 characters take 17 million
MAX_CUTTING = 1 << 28
MAX_MERGES = 1 << 20  # real vocabularies of 262,144 tokens have some 580,000; each takes 200 bytes
# characters of all merges together; twice as many merges as 262,144 tokens, of 8 characters, are 4
# million
MAX_MERGED = 1 << 25
NAMED = "tokenizer.chat_template."  # before the name of a template that has one
# Phi-3's other special tokens swallow the white space behind them
WITHOUT_RSTRIP = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class Split:
    """How a byte-level vocabulary's texts become words before merging."""

    pattern: str | None = None  # None: GPT-2's own, which the library has built in
    before: tuple[str, ...] = ()  # patterns of words that are found before it, one after another
    single_digits: bool = False  # each digit is a word, before anything else
    is_nfc: bool = False  # the text is normalized first
    whole_words: bool = False  # a word that is a token is taken as it is, whatever the merges say
    adds_bos: bool = False  # where the file does not say


_LLAMA3 = Split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    whole_words=True,
    adds_bos=True,
)
_QWEN2 = Split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    is_nfc=True,
)
_QWEN35 = replace(
    _QWEN2,
    pattern=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = Split(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}| "
    rf"?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    whole_words=True,
    adds_bos=True,
)
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = Split(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# DeepSeek's lists of letters and of Chinese, Japanese and Korean characters
_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ"
    "-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_CJK, _HAN_AND_KANA = "[一-龥ࠀ-一가-퟿]+", "[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK_LLM = Split(r"\p{N}", (r"[\r\n]", rf"\s?[{_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK))
_DEEPSEEK_CODER = Split(r"\p{N}", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK))
_DEEPSEEK_V3 = Split(
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| "
    r"?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    (r"\p{N}{1,3}", _HAN_AND_KANA),
)
_SEED = Split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By tokenizer.ggml.pre; the patterns are those of the models' own tokenizer.json. A file from
# before there were names says `default`.
SPLITS = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4"), Split()),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), Split(single_digits=True)
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), replace(_LLAMA3, whole_words=False, adds_bos=False)),
    "glm4": replace(_LLAMA3, adds_bos=False),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "stablelm2", "hunyuan"), _QWEN2),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK_V3),
    "seed-coder": _SEED,
}


def make_tokenizer(head: GgufHead) -> dict[str, Any]:
    """The file's tokenizer.json. Raises StartupError for a kind of tokenizer that is not
    supported."""
    kind = head.text("tokenizer.ggml.model")
    if kind == "gpt2":
        return _byte_level(head, _unique(head.items("tokenizer.ggml.tokens", str)))
    if kind in ("llama", "gemma4"):  # whose file lists the merges
        return _sentencepiece(head, _unique(head.items("tokenizer.ggml.tokens", str)))
    if kind == "bert":
        return _wordpiece(head, head.items("tokenizer.ggml.tokens", str))
    raise StartupError(
        f"{head.path}: the tokenizer {kind!r} is not supported; these are: gpt2 (byte-level BPE), llama and gemma4 "
        "(SentencePiece BPE), bert (WordPiece)"
    )


def make_tokenizer_config(head: GgufHead) -> dict[str, Any]:
    """The file's tokenizer_config.json: special tokens, and the chat template if there is one, with
    those that have names of their own."""
    tokens = head.items("tokenizer.ggml.tokens", str)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = head.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            config[f"{name}_token"] = tokens[number]
    if "tokenizer.chat_template" in head.metadata:
        named = {
            key.removeprefix(NAMED): value
            for key, value in head.metadata.items()
            if key.startswith(NAMED) and isinstance(value, str)
        }
        default = head.text("tokenizer.chat_template")
        texts = {"default": default} | named
        config["chat_template"] = (
            [{"name": name, "template": text} for name, text in texts.items()] if named else default
        )
    return config


def _byte_level(head: GgufHead, tokens: list[str]) -> dict[str, Any]:
    name = head.text("tokenizer.ggml.pre", "default")
    split = SPLITS.get(name)
    if split is None:
        raise StartupError(
            f"{head.path}: the pre-tokenizer {name!r} is not supported; these are: {', '.join(sorted(SPLITS))}"
        )
    add_prefix_space = bool(head.metadata.get("tokenizer.ggml.add_space_prefix", False))
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": split.pattern is None,
    }
    first: list[dict[str, Any]] = []
    if split.single_digits:
        first.append({"type": "Digits", "individual_digits": True})
    for pattern in (*split.before, *([split.pattern] if split.pattern is not None else [])):
        first.append({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False})
    merges = _read_merges(head, tokens)
    return _assemble(
        head,
        tokens,
        model=_bpe(tokens, merges, ignore_merges=split.whole_words),
        added=_added_tokens(head, tokens),
        normalizer={"type": "NFC"} if split.is_nfc else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*first, byte_level]},
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        adds_bos=split.adds_bos,
    )


def _sentencepiece(head: GgufHead, tokens: list[str]) -> dict[str, Any]:
    """Spaces become ▁, and bytes that no token has become byte tokens. A run of spaces may stand in
    the file as spaces: it is found by merging, as ▁."""
    tokens = [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    add_prefix = bool(head.metadata.get("tokenizer.ggml.add_space_prefix", True))
    unknown = head.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    unk_token = tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None
    merges = _read_merges(head, tokens) if "tokenizer.ggml.merges" in head.metadata else _merges_by_score(head, tokens)
    to_space: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if add_prefix:
        to_space = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, to_space]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _assemble(
        head,
        tokens,
        model=_bpe(tokens, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True),
        added=_added_tokens(head, tokens),
        normalizer=to_space,
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
        adds_bos=True,
    )


def _wordpiece(head: GgufHead, tokens: list[str]) -> dict[str, Any]:
    """BERT's. A file marks the beginning of a word, where the original marks what continues it. Whether
    a text becomes lower case first is not in the file: it does if no token has a letter from A to Z."""
    kinds = _kinds(head, tokens)
    names = _unique(
        [
            token if kind == CONTROL else token[1:] if token.startswith(SPACE) else "##" + token
            for token, kind in zip(tokens, kinds, strict=True)
        ]
    )
    is_cased = any(kind == NORMAL and UPPER_CASE.search(token) for token, kind in zip(tokens, kinds, strict=True))
    special = {}
    for name, default in (("cls", "bos"), ("seperator", "eos"), ("unknown", "unknown")):
        number = head.metadata.get(
            f"tokenizer.ggml.{name}_token_id", head.metadata.get(f"tokenizer.ggml.{default}_token_id")
        )
        if not isinstance(number, int) or not 0 <= number < len(names):
            raise StartupError(f"{head.path}: tokenizer.ggml.{name}_token_id is {number}, no token")
        special[name] = names[number], number
    (begin, begin_id), (end, end_id) = special["cls"], special["seperator"]
    first = [{"SpecialToken": {"id": begin, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    first.append({"SpecialToken": {"id": end, "type_id": 0}})
    second = [{"Sequence": {"id": "B", "type_id": 1}}, {"SpecialToken": {"id": end, "type_id": 1}}]
    tokens_around = {begin: begin_id, end: end_id}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(head, names),
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": not is_cased,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": first,
            "pair": [*first, *second],
            "special_tokens": {
                token: {"id": token, "ids": [number], "tokens": [token]} for token, number in tokens_around.items()
            },
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": special["unknown"][0],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {token: number for number, token in enumerate(names)},
        },
    }


def _assemble(
    head: GgufHead,
    tokens: list[str],
    *,
    model: dict[str, Any],
    added: list[dict[str, Any]],
    normalizer: Any,
    pre_tokenizer: Any,
    decoder: Any,
    adds_bos: bool,
) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _template(head, tokens, adds_bos),
        "decoder": decoder,
        "model": model,
    }


def _template(head: GgufHead, tokens: list[str], adds_bos: bool) -> dict[str, Any] | None:
    """The tokens around a text: the BOS and EOS tokens that the file asks for."""
    around: dict[str, str] = {}
    for name, default in (("bos", adds_bos), ("eos", False)):
        number = head.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if (
            head.metadata.get(f"tokenizer.ggml.add_{name}_token", default)
            and isinstance(number, int)
            and 0 <= number < len(tokens)
        ):
            around[name] = tokens[number]
    if not around:
        return None

    def pieces(*ids: str) -> list[dict[str, Any]]:
        before = [{"SpecialToken": {"id": around["bos"], "type_id": 0}}] if "bos" in around else []
        after = [{"SpecialToken": {"id": around["eos"], "type_id": 0}}] if "eos" in around else []
        return [*before, *({"Sequence": {"id": each, "type_id": 0}} for each in ids), *after]

    specials = {token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]} for token in around.values()}
    return {"type": "TemplateProcessing", "single": pieces("A"), "pair": pieces("A", "B"), "special_tokens": specials}


def _bpe(
    tokens: list[str],
    merges: list[tuple[str, str]],
    *,
    unk_token: str | None = None,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": fuse_unk,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": merges,
    }


def _kinds(head: GgufHead, tokens: list[str]) -> list[int]:
    """The type of each token. Raises StartupError for a list of another length."""
    if "tokenizer.ggml.token_type" not in head.metadata:
        return [NORMAL] * len(tokens)
    kinds = head.items("tokenizer.ggml.token_type", int)
    if len(kinds) != len(tokens):
        raise StartupError(f"{head.path}: {len(tokens)} tokens, but types of {len(kinds)}")
    return kinds


def _added_tokens(head: GgufHead, tokens: list[str]) -> list[dict[str, Any]]:
    """The tokens that are found in a text as a whole, before it is split: the special ones, and
    those that the model's makers added."""
    is_phi3 = (
        head.metadata.get("general.architecture") == "phi3" and head.metadata.get("tokenizer.ggml.model") == "llama"
    )
    return [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": is_phi3 and kind == CONTROL and token not in WITHOUT_RSTRIP,
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for number, (token, kind) in enumerate(zip(tokens, _kinds(head, tokens), strict=True))
        if kind in (UNKNOWN, CONTROL) or (kind == USER_DEFINED and token.strip(SPACE))
    ]


def _unique(tokens: list[str]) -> list[str]:
    """A token that is there twice keeps its first id; the second gets a name that stands in no
    text, for ids must go on counting."""
    seen: set[str] = set()
    names = []
    for number, token in enumerate(tokens):
        names.append(token if token and token not in seen else f"<|unused {number}|>")
        seen.add(token)
    return names


def _read_merges(head: GgufHead, tokens: list[str]) -> list[tuple[str, str]]:
    """The file's merges. Raises StartupError for one of what is no token, or to what is none, and
    for more than any real vocabulary has.
    """
    known = set(tokens)
    listed = head.items("tokenizer.ggml.merges", str)
    if len(listed) > MAX_MERGES or sum(map(len, listed)) > MAX_MERGED:
        raise StartupError(
            f"{head.path}: {len(listed)} merges of {sum(map(len, listed))} characters; at most {MAX_MERGES} of "
            f"{MAX_MERGED} are read"
        )
    merges = [_halves(merge) for merge in listed]
    for left, right in merges:
        if not {left, right, left + right} <= known:
            raise StartupError(f"{head.path}: the merge {left!r} {right!r} is not of tokens, or makes none")
    return merges


def _halves(merge: str) -> tuple[str, str]:
    """The two tokens of a merge. The first is never empty, so it may begin with the space that
    divides them."""
    left, _, right = merge[1:].partition(" ")
    return merge[:1] + left, right


def _merges_by_score(head: GgufHead, tokens: list[str]) -> list[tuple[str, str]]:
    """SentencePiece merges whichever pair makes the token with the best score: all pairs of tokens
    that make a token, best first.

    Gemma's scores say nothing of that order; its tokens' ids do.
    """
    number_of = {
        token: number
        for number, (token, kind) in enumerate(zip(tokens, _kinds(head, tokens), strict=True))
        if kind in (NORMAL, USER_DEFINED)
    }
    if str(head.metadata.get("general.architecture")).startswith("gemma"):
        scores = [-float(number) for number in range(len(tokens))]
    else:
        scores = head.items("tokenizer.ggml.scores", (int, float))
    if len(scores) != len(tokens):
        raise StartupError(f"{head.path}: {len(tokens)} tokens, but scores of {len(scores)}")
    for token, number in number_of.items():
        if len(token) > MAX_TOKEN:
            raise StartupError(
                f"{head.path}: token {number} has {len(token)} characters; at most {MAX_TOKEN} are merged"
            )
    if sum(len(token) ** 2 for token in number_of) > MAX_CUTTING:
        raise StartupError(f"{head.path}: the tokens are too many and too long to find their merges")
    ranked, num_merged = [], 0
    for token, number in number_of.items():
        for cut in range(1, len(token)):
            left, right = number_of.get(token[:cut]), number_of.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[number], number, left, right))
                num_merged += len(token)
        if num_merged > MAX_MERGED or len(ranked) > MAX_MERGES:
            raise StartupError(
                f"{head.path}: the tokens make more than {MAX_MERGES} merges, or of more than {MAX_MERGED} "
                "characters; no real vocabulary does"
            )
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in ranked]
