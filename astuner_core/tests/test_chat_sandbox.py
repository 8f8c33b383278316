"""A quickened chat template writes what it wrote before, and reads no more than it was allowed to."""

from __future__ import annotations

from transformers.utils.chat_template_utils import _compile_jinja_template

from astuner.chat.sandbox import quicken
from tests.table import table

MESSAGES = [
    {"role": "user", "content": "a b", "items": "a key", "_own": "hidden"},
    {"role": "tool", "content": "{0}", "deep": {"keys": [1], "x": None}},
]


def rendered(text: str) -> str:
    """What a template writes, and then writes again from memory, or of what kind its error is."""
    template = _compile_jinja_template(text)
    found = []
    for _ in range(2):
        try:
            found.append(template.render(messages=MESSAGES))
        except Exception as e:
            found.append(f"{type(e).__name__}: {e}")
    assert found[0] == found[1]
    return found[0]


@table(
    ("body", "wanted"),
    [
        (
            "{% for m in messages %}{{ loop.index0 }}{{ m.role.upper() }}{{ m.content }};{% endfor %}",
            "0USERa b;1TOOL{0};",
        ),
        ("{{ messages[0].items() | list | length }}", "4"),  # a method before a key of that name
        ("{{ messages[1].deep.x is none }}{{ messages[1].deep.y is defined }}{{ messages[0].nothing }}", "TrueFalse"),
        ("{{ messages[1].content.format('x') }}{{ messages[0]._own }}", "xhidden"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "2"),
        ("{{ messages[1].deep | tojson }}{{ 'é' | tojson }}", '{"keys": [1], "x": null}"é"'),
        ("{{ messages[1].deep | tojson(separators=(',', ':')) }}", '{"keys":[1],"x":null}'),
        ("{{ messages[0].nothing | tojson }}", "TypeError: "),
        ("{{ messages[0].clear }}{{ messages[0].nothing is defined }}", "False"),
        ("{{ messages[0].__class__ }}", ""),
        ("{{ messages[0].content.__class__.__mro__ }}", "SecurityError: "),
        ("{{ messages.append(1) }}", "SecurityError: "),
        ("{{ messages[0].update(role='x') }}", "SecurityError: "),
        ("{{ '{0.__class__}'.format(messages) }}", ""),
        ("{{ messages[0].nothing.more }}", "UndefinedError: "),
    ],
)
def test_a_quickened_template_writes_and_refuses_what_it_did(body: str, wanted: str) -> None:
    quick = "{# quick #}" + body
    quicken(quick)
    quicken(quick)
    assert "getattr" in vars(_compile_jinja_template(quick).environment)
    before = rendered(body)
    assert rendered(quick) == before
    assert before == wanted if ": " not in wanted else before.startswith(wanted)
