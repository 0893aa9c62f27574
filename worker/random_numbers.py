"""Random numbers that are a pure function of a request's seed and a token's index, which nothing else can change.

Runs on the engine thread.
"""

XTC_STREAM = 0x58544358544358
"""Added to the seed for the second number that XTC needs beside the one that draws."""

_MASK64 = 2**64 - 1


def uniform(seed: int, index: int) -> float:
    """Return the random number in [0, 1) of token `index` of a request.

    SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), applied to the seed and then
    to the stream it names; the top 53 bits of the result make the number.
    """
    return (_mix(_mix(seed) + (index + 1) * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    """SplitMix64's finaliser (Stafford's variant 13), one to one on 64 bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
