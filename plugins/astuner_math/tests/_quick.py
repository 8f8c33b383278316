"""What the math judge decides without algebra."""

from astuner_math.values import compare


def quick_verdict(reference: str, candidate: str) -> bool | None:
    """Return whether two normalised answers are equal, or None where only algebra can decide."""
    verdict = compare(reference, candidate)
    return verdict if isinstance(verdict, bool) else None
