"""What this plugin offers, described without importing it."""

from __future__ import annotations

from astuner import Provider, hookimpl


@hookimpl
def register_judges() -> dict[str, Provider]:
    return {
        "weighted": Provider(
            target="astuner_helpers.weighted:Weighted",
            summary="a weighted sum of other judges",
            config="astuner_helpers.weighted:WeightedConfig",
        ),
    }


@hookimpl
def register_subscribers() -> dict[str, Provider]:
    return {
        "helper_usage": Provider(
            target="astuner_helpers.models:HelperMeter",
            summary="what a run uses of its helper models",
        )
    }


@hookimpl
def register_parts() -> dict[str, Provider]:
    return {
        "helper_models": Provider(
            target="astuner_helpers.models:HelperModels",
            summary="models that help an experiment and are not trained (astuner.helper_models)",
        ),
        "external_model": Provider(
            target="astuner_helpers.external:ExternalModel",
            summary="a model outside of the run that speaks for an agent (model: external in astuner.agents)",
        ),
    }


@hookimpl
def register_config_keys() -> dict[str, Provider]:
    return {
        "helper_models": Provider(
            target="astuner_helpers.settings:HelperModelKeys",
            summary="models that help and are not trained",
        )
    }
