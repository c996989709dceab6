"""The names of the KV cache's blocks: a hash of a block's tokens, chained to its parent's, from a
root. Compute finds blocks by them, and a tokenizer the replica that has a prompt's."""

import hashlib
from array import array
from collections.abc import Sequence
from functools import lru_cache

HINT_BYTES = 8  # of a hash, in the sets by which tokenizers choose a replica


@lru_cache(maxsize=1024)
def prefix_root(fingerprint: str, *, salt: str = "") -> bytes:
    """The hash that stands before a sequence's first block: of all that decides the bytes of its
    keys and values apart from its tokens, and of who may share them.

    fingerprint: of the model and its arithmetic (Fingerprint.kv); salt: the client's. Each is
    hashed with its length, so that no other pair gives the same bytes.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in (fingerprint, salt):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """A block's hash. parent: that of the block before it, or the root."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


def segment_root(root: bytes, position: int, seen: Sequence[bytes]) -> bytes:
    """The hash that stands before a segment's first block (segments.py). position: of its first
    token; seen: the hashes of the last blocks of the segments that it sees. One that sees none and
    begins at position 0 has the root of an ordinary prompt."""
    if position == 0 and not seen:
        return root
    return hashlib.blake2b(
        b"".join([root, position.to_bytes(8, "little"), *seen]), digest_size=16, person=b"segment"
    ).digest()


def prefix_hashes(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The hashes of the whole blocks of these tokens."""
    hashes = [root]
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        hashes.append(block_hash(hashes[-1], token_ids[start : start + block_size]))
    return hashes[1:]
