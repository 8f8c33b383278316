"""Play Werewolves: several agents with hidden roles in one episode, with a reward for each role."""

from __future__ import annotations

from werewolf_player import Player
from werewolf_rules import WEREWOLF, Game
from werewolf_table import Table
from werewolf_words import rules_for

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask

PRICE = 2.0
"""Penalty of a side if all of its choices are wasted, compared with 1 for a victory. A reward for victory alone would
need many more games, because a game is won or lost for many reasons."""


class WerewolvesWorkflow(Workflow):
    """Workflow of one game. The task's metadata is the deal, so all attempts of a group play the same deal.

    The fields are ``roles`` (player 1 first), ``first_speaker`` (opens the first day) and ``max_days``.
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
        # The name separates the conversations of an episode; the role selects the policy and who trains.
        model = model_tuner.as_agentscope_model(agent_name=f"player_{number}", role=game.role(number))
        return Player(f"Player {number}", rules_for(game, number), model)
