"""What this plugin offers, described without importing it."""

from __future__ import annotations

from astuner import Provider, hookimpl


@hookimpl
def register_task_readers() -> dict[str, Provider]:
    return {
        "huggingface": Provider(
            target="astuner_datasets.reader:HuggingFaceTaskReader",
            summary="a Hugging Face data set: hub name, local folder, parquet",
            config="astuner_datasets.reader:HuggingFaceConfig",
            requires=("datasets",),
            install="pip install astuner-datasets",
            aliases=("huggingface_dat_repo",),
        )
    }
