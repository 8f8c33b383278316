"""What this plugin offers, described without importing it."""

from astuner import Provider, hookimpl


@hookimpl
def register_judges():
    return {
        "word_overlap": Provider(
            target="astuner_acme.judge:WordOverlapJudge",
            summary="F1 score of the answer's words against the reference's",
            config="astuner_acme.judge:WordOverlapConfig",
        ),
    }
