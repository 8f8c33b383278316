"""Compare the flagged phrases and the length of the pages with their budgets: ``python -m tests.wording``."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import yaml

from tests.wording import compare_with_budget, flagged_phrases, hand_written_words, tracked_files

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "phrases.yaml"
MARK = "budget:\n"


def main() -> int:
    """Return the exit status: 1 if an area has more phrases than its budget or fewer, or the pages are too long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", nargs="*", metavar="PATH", help="list the phrases below these folders or files")
    parser.add_argument("--lower", action="store_true", help="lower the budget to the present numbers")
    options = parser.parse_args()
    data = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    paths = tracked_files(ROOT)
    flagged = flagged_phrases(ROOT, paths, data["phrases"])
    if options.list is not None:
        for phrase in flagged:
            if not options.list or any(phrase.path.startswith(path.rstrip("/")) for path in options.list):
                print(f"{phrase.path}:{phrase.line}: {phrase.name}: {phrase.text}")
        return 0
    budget = data["budget"] or {}
    differences = compare_with_budget(flagged, budget)
    too_many = {area for area, (count, allowed) in differences.items() if count > allowed}
    for phrase in flagged:
        if phrase.area in too_many:
            print(f"{phrase.path}:{phrase.line}: {phrase.name}: {phrase.text}")
    for area in sorted(too_many):
        count, allowed = differences[area]
        print(f"{area}: {count} flagged phrases, {allowed} allowed. Rewrite the new sentences; see CONTRIBUTING.md.")
    if not too_many and differences and options.lower:
        counts = Counter(phrase.area for phrase in flagged)
        head = DATA.read_text(encoding="utf-8").split(MARK)[0]
        lines = "".join(f"  {area!r}: {count}\n" for area, count in sorted(counts.items()))
        DATA.write_text(head + MARK + lines, encoding="utf-8")
    elif not too_many and differences:
        print(f"Fewer flagged phrases than allowed in {', '.join(differences)}. Run: python -m tests.wording --lower")
    words = hand_written_words(ROOT, paths)
    if words > data["page_words"]:
        print(f"The hand-written pages have {words:,} words, {data['page_words']:,} are allowed. Shorten them.")
    return bool(too_many or (differences and not options.lower) or words > data["page_words"])


if __name__ == "__main__":
    sys.exit(main())
