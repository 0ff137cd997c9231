"""Computes Keccak-256 as Ethereum uses it, with the padding of the original submission. Python's hashlib has only SHA-3
(FIPS 202), which pads differently."""

from __future__ import annotations

_MASK = (1 << 64) - 1
_RATE = 136


def _constants() -> tuple[list[int], list[tuple[int, int, int]]]:
    """Compute the constants of the Keccak permutation. Returns two lists: the round constants, by the LFSR of FIPS 202,
    3.2.5; and, for each lane in the steps rho and pi, (source lane, bits of rotation, target lane)."""
    rounds, state = [], 1
    for _ in range(24):
        constant = 0
        for bit in range(7):
            if state & 1:
                constant |= 1 << (1 << bit) - 1
            state = state << 1 ^ (0x171 if state & 0x80 else 0)
        rounds.append(constant)
    moves, x, y = [(0, 0, 0)], 1, 0
    for step in range(24):
        moves.append((x + 5 * y, (step + 1) * (step + 2) // 2 % 64, y + 5 * ((2 * x + 3 * y) % 5)))
        x, y = y, (2 * x + 3 * y) % 5
    return rounds, moves


_ROUNDS, _MOVES = _constants()


def keccak256(data: bytes) -> bytes:
    """Return the Keccak-256 hash of `data`, 32 bytes."""
    padded = bytearray(data + b"\x01" + b"\0" * (-(len(data) + 1) % _RATE))
    padded[-1] |= 0x80
    block = bytes(padded)
    lanes = [0] * 25
    for start in range(0, len(block), _RATE):
        for i in range(_RATE // 8):
            lanes[i] ^= int.from_bytes(block[start + 8 * i:start + 8 * i + 8], "little")
        lanes = _permuted(lanes)
    return b"".join(lane.to_bytes(8, "little") for lane in lanes[:4])


def _permuted(lanes: list[int]) -> list[int]:
    for constant in _ROUNDS:
        parities = [lanes[x] ^ lanes[x + 5] ^ lanes[x + 10] ^ lanes[x + 15] ^ lanes[x + 20] for x in range(5)]
        mixes = [parities[x - 1] ^ ((parities[x - 4] << 1 | parities[x - 4] >> 63) & _MASK) for x in range(5)]
        moved = [0] * 25
        for source, turn, place in _MOVES:
            lane = lanes[source] ^ mixes[source % 5]
            moved[place] = (lane << turn | lane >> 64 - turn) & _MASK
        lanes = [moved[i] ^ (~moved[i - i % 5 + (i + 1) % 5] & moved[i - i % 5 + (i + 2) % 5]) for i in range(25)]
        lanes[0] ^= constant
    return lanes
