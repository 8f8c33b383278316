"""What a run came to, in one line: was anything trained, and is the policy better on tasks it was not trained on?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astuner_report.run_report.held_out import SIGNIFICANT

_ENOUGH = "64 or more held-out tasks"


def verdict(facts: Mapping[str, Any]) -> dict[str, str]:
    """
    :param facts: of `astuner_report.run_report.facts.gather`.
    :returns: ``word``: learned, may be chance, nothing was learned, got worse, nothing was trained, or not measured;
        ``text``: the line, which begins with it; ``level``: ``good``, ``warning`` or ``error``.
    """
    updated, found = facts["updated"], facts["held_out"]
    if not updated["steps"]:
        cut = next((alarm for alarm in facts["alarms"] if alarm["rule"] == "cut_off"), None)
        advice = f"{cut['message']}, so raise that first" if cut else updated["advice"]
        return _said("nothing was trained", "; ".join(filter(None, (updated["why"], advice))))
    if updated["why"] and not (found or {}).get("difference", {}).get("significant"):  # worse is said before why
        moved = f"{updated['why']}, so only the KL or entropy term moved the weights"
        return _said("nothing was learned", "; ".join(filter(None, (moved, updated["advice"]))))
    if found is None:
        in_training = _in_training(facts["reward"])
        return _said("not measured", f"there are no held-out tasks; {in_training}; {_ENOUGH} can tell")
    if "difference" not in found:
        missing = "before" if found["after"]["step"] else "after"
        key = "; set astuner.trainer_common.val_before_train=true" if missing == "before" else ""
        return _said("not measured", f"there was no validation {missing} training{key}")
    return _compared(found, (facts["trained"]["optim"] or {}).get("lr"))


def _compared(found: Mapping[str, Any], rate: float | None) -> dict[str, str]:
    d, before, after = found["difference"], found["before"]["success"], found["after"]["success"]
    text = f"{points(d['mean'])}, p {p_value(d['p'])} (held out {before:.1%} to {after:.1%}, {d['tasks']} tasks)"
    if d["significant"]:
        return _said("learned", text, "good") if d["mean"] > 0 else _said("got worse", text, "error")
    if 2 * 0.5 ** d["tasks"] >= SIGNIFICANT:
        word = "may be chance" if d["mean"] else "nothing was learned"
        return _said(word, f"{text}; so few cannot tell: {_ENOUGH} can")
    if d["mean"]:
        return _said("may be chance", f"{text}, so nothing is shown to be learned")
    advice = f", or with a larger astuner.trainer_common.optim.lr than {rate:g}" if rate is not None else ""
    return _said("nothing was learned", f"{text}; train longer{advice}")


def _in_training(reward: Mapping[str, float] | None) -> str:
    if reward is None:
        return "nor is there a reward"
    change = f"{reward['first']:.3g} to {reward['last']:.3g}, p {p_value(reward['p'])}"
    if reward["p"] >= SIGNIFICANT:
        return f"the reward in training did not change beyond chance ({change}), so nothing was learned that shows"
    return f"the reward in training {'rose' if reward['rising'] else 'fell'} ({change})"


def points(difference: float) -> str:
    """A difference of two shares: ``+71 points``."""
    return f"{100 * difference:+.{0 if abs(difference) >= 0.0995 else 1}f} points"


def p_value(p: float) -> str:
    return f"= {p:.2g}" if p >= 0.001 else "< 0.001"


def _said(word: str, text: str, level: str = "warning") -> dict[str, str]:
    return {"word": word, "text": f"{word}: {text}", "level": level}
