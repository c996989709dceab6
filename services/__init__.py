"""Penstock's stages, one package each, and the programs around them (the command line, the launcher)."""
