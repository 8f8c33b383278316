"""What this plugin offers, described without importing it."""

from __future__ import annotations

from astuner import Provider, hookimpl


@hookimpl
def register_commands() -> dict[str, Provider]:
    return {
        "replay": Provider(
            target="astuner_record.replay_command:app",
            summary="judge a recorded episode again, or run it again from some turn on",
        ),
        "check": Provider(
            target="astuner_record.check_command:app",
            summary="check that an agent keeps tokens exact, without a GPU",
        ),
    }


@hookimpl
def register_subscribers() -> dict[str, Provider]:
    return {
        "episode_log": Provider(
            target="astuner_record.subscriber:Record",
            summary="every episode with its tokens, in the run folder",
        ),
        "certificate": Provider(
            target="astuner_record.certificate:CertificateFile",
            summary="how exactly turns went on, and what became of every token",
        ),
    }


@hookimpl
def register_parts() -> dict[str, Provider]:
    return {
        "episode_data": Provider(
            target="astuner_record.episode_log.convert:EpisodeData",
            summary="a run's episodes as Parquet, JSONL, SFT or DPO data",
        )
    }
