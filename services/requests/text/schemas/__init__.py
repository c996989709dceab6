"""JSON schemas, rewritten into what the grammars' library can enforce."""
