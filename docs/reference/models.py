"""The page of architectures, and the same list for `penstock models --supported`: tests/models/cases.py says of
each how it runs, and `make verify SUITE=models` that this is so."""

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from docs.reference.markdown import HEAD, code, paragraph, table
from services.compute.models.architectures import ARCHITECTURES
from shared.model.gguf.families import FAMILIES
from tests.models.blueprints import Blueprint
from tests.models.cases import CASES

INTRODUCTION = """`penstock models --supported` prints this list. Each row was tried: a tiny model of random
weights continues prompts in a batch, in chunks and over the prefix cache, and its tokens are those of transformers
(`make verify SUITE=models`). An architecture that is not listed runs on transformers' own modules, if a probe at
start finds that it can; otherwise the start ends with one line that says why."""
FORMS = {
    "native": "native",
    "ragged": "library",
    "one by one": "library, one by one",
}
LEGEND = """Native: Penstock's own decoder. Library: transformers' modules, with Penstock's kernels in the place of
their matrices, experts and plain attention. One by one: each sequence is a pass of its own; models with recurrent
states run so, without the prefix cache and without speculation."""
WEIGHTS = """All forms read float32, bfloat16, FP8 (by tensor and in blocks), AWQ, GPTQ, compressed-tensors,
bitsandbytes and MXFP4 as published, and GGUF where the table names an architecture of GGUF; and all take
`--quantization` (see [models](../understand/models.md) for what stays float)."""
APIS = """Every model that generates serves chat (with a chat template), completions, responses and the other
dialects, tools, structured output and batches. Models that see take images where they are native
([images](../use/images.md)); the others answer as text. Encoders and decoders with pooling serve embeddings and scores
([embeddings](../use/embeddings.md))."""


def page() -> str:
    """The page in Markdown."""
    rows = [
        [code(name), code(text), form, ", ".join(map(code, gguf)), reason]
        for name, text, form, gguf, reason in listed()
    ]
    head = ["architecture", "its text's type", "form", "GGUF", "reason of a refusal"]
    parts = [paragraph(text) for text in (INTRODUCTION, LEGEND, WEIGHTS, APIS)]
    return "# Architectures\n\n" + HEAD + "\n".join(parts) + "\n" + table(head, rows)


def listing() -> str:
    """The list for a terminal."""
    lines = []
    for name, text, form, gguf, reason in listed():
        lines.append(f"{name + (f' ({text})' if text else ''):58} {form:29} {reason or ', '.join(gguf)}".rstrip())
    return "\n".join([f"{'ARCHITECTURE':58} {'FORM':29} GGUF", *lines]) + "\n"


def listed() -> list[tuple[str, str, str, list[str], str]]:
    """Of each architecture its name, the type of its text if it sees, its form, GGUF's names of it, and why it is
    refused."""
    forms: dict[tuple[str, str], dict[str, str]] = {(name, ""): {"native": ""} for name in ARCHITECTURES}
    tried = [(class_of(blueprint), blueprint, outcome) for outcome, blueprint in CASES.values()]
    for name, blueprint, outcome in tried:
        form, _, reason = outcome.partition(": ")
        text = blueprint.text.model_type if blueprint.text is not None else ""
        if text:
            forms.pop((name, ""), None)
        forms.setdefault((name, text), {})[FORMS.get(form, form)] = reason
    return [
        (
            name,
            text,
            " or ".join(ways),
            [word for word, family in sorted(FAMILIES.items()) if name in (family.architecture, *family.others)],
            "; ".join(filter(None, ways.values())),
        )
        for (name, text), ways in sorted(forms.items())
    ]


def class_of(blueprint: Blueprint) -> str:
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if blueprint.text is None else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    name = names.get(blueprint.model_type) or MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[blueprint.model_type]
    return name if isinstance(name, str) else name[0]
