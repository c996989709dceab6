"""Penstock's stages, one package each, and the programs around them: operator (the command line)
and chat (a client).
"""
