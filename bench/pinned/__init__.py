"""Measurement of the allocator of pinned memory: `chameleon-mm bench pinned`, and the recorded steps that it plays.

command -> operations | waste | rates       # times of a block; bytes lost, by allocator; pinning and copies
record -> models -> traces                  # how bench/traces/*.jsonl.gz came to be; waste plays them to allocators
"""
