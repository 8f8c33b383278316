"""Cache the verdicts of Jinja's sandbox, which take half of the time of a rendering.

A chat template may come from anywhere, so transformers renders it in a sandbox. The sandbox checks every attribute
access, about fifty per rendering. Its verdict depends only on the type and the attribute's name.
"""

from __future__ import annotations

from typing import Any

from astuner.contracts.messages import ENCODE

_TRIED = {"<é'": [1, -2.5, True, None, '"\n']}
"""A value on which transformers' JSON filter is compared with ASTuner's."""


def quicken(template: str) -> None:
    """Cache the sandbox's verdicts for ``template`` in this process.

    Its global names are joined once, and one encoder writes all JSON. Results do not change. If a release of
    transformers stores its templates elsewhere, nothing is changed.
    """
    from transformers.utils import chat_template_utils

    if (compiled := getattr(chat_template_utils, "_compile_jinja_template", None)) is None:
        return
    loaded = compiled(template)
    loaded.globals = dict(loaded.globals)  # a chain of mappings, which Jinja would join again in every rendering
    environment = loaded.environment
    if "getattr" in vars(environment):  # already done
        return
    asked, look, of_dict = environment.is_safe_attribute, environment.getattr, frozenset(dir(dict))
    verdicts: dict[tuple[type, str], bool] = {}

    def is_safe_attribute(obj: Any, attribute: str, value: Any) -> bool:
        key = type(obj), attribute
        if key not in verdicts:
            verdicts[key] = asked(obj, attribute, value)
        return verdicts[key]

    def get_attribute(obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in of_dict:  # a key, which needs no check
            return obj[attribute] if attribute in obj else environment.undefined(obj=obj, name=attribute)
        return look(obj, attribute)

    plain, write_json = environment.filters["tojson"], ENCODE

    def to_json(value: Any, *args: Any, **kwargs: Any) -> str:
        return str(plain(value, *args, **kwargs)) if args or kwargs else write_json(value)

    if plain(_TRIED) == write_json(_TRIED):  # the cached encoder gives the same result
        environment.filters["tojson"] = to_json
    environment.is_safe_attribute, environment.getattr = is_safe_attribute, get_attribute
