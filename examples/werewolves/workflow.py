"""Werewolves: several agents with hidden roles in one episode, each role rewarded for its side's victory."""

from __future__ import annotations

from werewolf_player import Player
from werewolf_rules import WEREWOLF, Game
from werewolf_table import Table
from werewolf_words import rules_for

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask

PRICE = 2.0
"""What it costs a side if all of its choices count for nothing, against 1 for victory. Victory alone would say so too,
but a game is won or lost for many reasons, and it would take many games."""


class WerewolvesWorkflow(Workflow):
    """One episode is one game. The task's metadata is the deal, so all attempts of a group play the same one.

    Metadata: ``roles`` (player 1's first), ``first_speaker`` (who opens the first day), ``max_days``.
    """

    name = "werewolves"

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        deal = workflow_task.task.metadata
        game = Game(roles=deal["roles"], max_days=deal["max_days"])
        players = {number: self.seat(game, number, model_tuner) for number in game.living}
        table = Table(game, players, first_speaker=deal["first_speaker"])
        await table.play()
        return WorkflowOutput(
            # role -> reward: the entries of astuner.agents
            reward={role: reward - PRICE * table.wasted(role) for role, reward in game.rewards().items()},
            is_success=game.winner == WEREWOLF,
            metadata={"winner": game.winner, "living": list(game.living)},
            metrics=table.metrics(),
        )

    def seat(self, game: Game, number: int, model_tuner: ModelTuner) -> Player:
        # The name tells the conversations of an episode apart, the role says who trains, with which policy.
        model = model_tuner.as_agentscope_model(agent_name=f"player_{number}", role=game.role(number))
        return Player(f"Player {number}", rules_for(game, number), model)
