"""Whether this tree may be released under a tag: ``python -m tests.packaging.release v0.1.0``, as release.yml asks."""

import datetime
import os
import re
import sys

from tests.packaging.metadata import ROOT, VERSION

HEADING = re.compile(r"^## (?P<version>\d+\.\d+\.\d+) \((?:unreleased|(?P<date>\d{4}-\d\d-\d\d))\)$")


def sections(changelog: str) -> list[tuple[str, datetime.date | None]]:
    """Version and date of each section, the newest first; the newest alone may have none yet.

    :raises ValueError: a heading is none, a date is no day, or they are not in order.
    """
    found = []
    for line in changelog.splitlines():
        if line.startswith("## "):
            if (heading := HEADING.match(line)) is None:
                raise ValueError(f"CHANGELOG.md: {line!r}; write: ## 0.1.0 (unreleased), or the date as 2027-01-31")
            date = heading["date"] and datetime.date.fromisoformat(heading["date"])
            found.append((heading["version"], date or None))
    numbers = [tuple(map(int, version.split("."))) for version, _ in found]
    if not found or numbers != sorted(set(numbers), reverse=True):
        raise ValueError("CHANGELOG.md: the newest version comes first, each once")
    dates = [date for _, date in found[found[0][1] is None :]]
    if None in dates or dates != sorted(dates, reverse=True):
        raise ValueError("CHANGELOG.md: all versions but the newest have a date, none before that of an older version")
    return found


def problem(tag: str, changelog: str, root: str, repository: str = "") -> str:
    """What is wrong, with what to do; empty: nothing.

    :param root: the root's pyproject.toml.
    :param repository: where it is released from, as ``https://host/owner/name``; empty: not known.
    """
    (version,) = VERSION.findall(root)
    if tag != f"v{version}":
        return f"the tag is {tag}, the version {version}; type: make metadata VERSION={tag.removeprefix('v')}"
    newest, date = sections(changelog)[0]
    if newest != version or date is None:
        return (
            f"CHANGELOG.md begins with {newest} ({date or 'unreleased'}); write: ## {version} ({datetime.date.today()})"
        )
    (source,) = re.findall(r'^urls\.Source = "(.*)"$', root, re.M)
    if repository and repository.lower() != source.lower():
        return f"pyproject.toml says that the source is {source}, not {repository}; correct urls, type: make metadata"
    return ""


def main(tag: str) -> None:
    texts = [(ROOT / name).read_text("utf-8") for name in ("CHANGELOG.md", "pyproject.toml")]
    here = [os.environ.get(name, "") for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY")]
    if wrong := problem(tag, *texts, "/".join(here) if all(here) else ""):
        sys.exit(wrong)


if __name__ == "__main__":
    main(*sys.argv[1:])
