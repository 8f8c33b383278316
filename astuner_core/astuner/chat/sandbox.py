"""What jinja's sandbox allows, remembered: to ask it anew takes half of a rendering.

A chat template may come from anywhere, so transformers renders it in a sandbox, which looks at every attribute that is
read, some fifty in a rendering.  What may be read depends on the type and the name alone.
"""

from __future__ import annotations

from typing import Any

from astuner.contracts.messages import ENCODE

_TRIED = {"<é'": [1, -2.5, True, None, '"\n']}
"""A value on which transformers' way to write JSON is compared with ours."""


def quicken(template: str) -> None:
    """Have transformers' renderings of ``template`` in this process take from memory what may be read.

    Its global names are joined once, and one encoder writes all JSON.  Renderings write what they wrote before.  Where
    a release of transformers keeps its templates elsewhere, nothing changes.
    """
    from transformers.utils import chat_template_utils

    if (compiled := getattr(chat_template_utils, "_compile_jinja_template", None)) is None:
        return
    loaded = compiled(template)
    loaded.globals = dict(loaded.globals)  # a chain of mappings, which jinja joins anew in every rendering
    environment = loaded.environment
    if "getattr" in vars(environment):  # done before
        return
    asked, look, of_dict = environment.is_safe_attribute, environment.getattr, frozenset(dir(dict))
    verdicts: dict[tuple[type, str], bool] = {}

    def is_safe_attribute(obj: Any, attribute: str, value: Any) -> bool:
        key = type(obj), attribute
        if key not in verdicts:
            verdicts[key] = asked(obj, attribute, value)
        return verdicts[key]

    def get_attribute(obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in of_dict:  # a key, which needs no verdict
            return obj[attribute] if attribute in obj else environment.undefined(obj=obj, name=attribute)
        return look(obj, attribute)

    plain, write_json = environment.filters["tojson"], ENCODE

    def to_json(value: Any, *args: Any, **kwargs: Any) -> str:
        return str(plain(value, *args, **kwargs)) if args or kwargs else write_json(value)

    if plain(_TRIED) == write_json(_TRIED):  # it needs no new encoder for every value
        environment.filters["tojson"] = to_json
    environment.is_safe_attribute, environment.getattr = is_safe_attribute, get_attribute
