"""The tokenizer owns what needs the text."""
