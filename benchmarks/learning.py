"""Check that every seed learns, and that controls without a learning signal do not.

Runs ``astuner run examples/math_agent/math_agent.yaml --backbone local`` in a fresh process and run folder per seed,
and reads the files of the run.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report import Report
from benchmarks.trained import (
    AS_SHIPPED,
    FRESH,
    REPOSITORY,
    Command,
    Condition,
    Runs,
    Trained,
    draw,
    table,
    train_all,
    verdict,
)

EXPERIMENT = REPOSITORY / "examples/math_agent/math_agent.yaml"
SEEDS = tuple(range(140, 160))
"""Unused seeds: the recipe was tuned on 0 to 3, 101, 102, and 200 to 204; 120 to 139 were on an earlier page."""
ABLATED = SEEDS[:3]
QUICK_SEEDS = (20,)
"""Separate seeds, so that quick runs do not reveal results of the benchmark's seeds."""
SHUFFLED = f"{REPOSITORY / 'benchmarks/shuffled_judge.py'}->ShuffledJudge"
COMMAND = (str(EXPERIMENT), "--backbone", "local", "astuner.data.max_validation_tasks=null")
BEFORE = (
    "astuner.data.train_batch_size=8",
    "astuner.rollout.num_repeat=8",
    "astuner.trainer_common.total_steps=250",
    "astuner.trainer_common.test_freq=50",
    "astuner.trainer_common.ppo_epochs=1",
    "astuner.trainer_common.use_kl_loss=false",
    "astuner.trainer_common.optim.lr=2.0e-3",
    "astuner.trainer_common.optim.lr_warmup_steps=5",
)
"""Recipe of commit 1156f89, with which about three seeds of ten ended at 75 %."""
LEAST_HELD_OUT = 150
GOAL = 0.9


def conditions(seeds: Sequence[int], ablated: Sequence[int]) -> dict[str, Condition]:
    shuffled = (f"astuner.task_judge.judge={SHUFFLED}",)
    return {
        AS_SHIPPED: Condition((), seeds),
        "recipe before": Condition(BEFORE, ablated),
        "shuffled rewards": Condition(shuffled, ablated, learns=False),
        "learning rate 0": Condition(("astuner.trainer_common.optim.lr=0",), ablated, learns=False),
    }


def run(*, quick: bool, runs: Runs = FRESH) -> Report:
    arguments = (*COMMAND, *(("astuner.trainer_common.total_steps=6",) if quick else ()))
    tried = conditions(QUICK_SEEDS, QUICK_SEEDS) if quick else conditions(SEEDS, ABLATED)
    found = train_all(tried, Command(arguments, LEAST_HELD_OUT), runs)
    shipped = found[AS_SHIPPED]
    report = Report(
        "Learning: success on held-out tasks, before and after",
        "`astuner run examples/math_agent/math_agent.yaml --backbone local`: the real AgentScope agent, "
        f"{len(shipped[0].rewards)} steps of GRPO on the shipped `tiny-calculator`. Each run is a separate process "
        f"with a fresh run folder. Success is measured on all {shipped[0].after.tasks} held-out tasks (no "
        "combination of wording and numbers in them occurs in a training task or warm-up transcript), one episode "
        "each, sampled as in training, with Wilson's 95 % interval. The recipe was tuned on other seeds; these were "
        "run for this page only.",
    )
    reached = sum(r.after.success >= GOAL for r in shipped)
    report.text(f"**{reached} of {len(shipped)} seeds end at {GOAL:.0%} or more**, {_ends(shipped)}.")
    table(report, found)
    if not quick:
        verdict(report, found, tried)
        report.text(
            "*Recipe before*: the recipe of commit 1156f89. *Shuffled rewards*: in training each episode gets the "
            "verdict of another, randomly chosen episode (`benchmarks/shuffled_judge.py`); in validation its own. "
            "*Learning rate 0*: everything runs, but the weights do not change. The change is the difference of two "
            "proportions over the tasks of all seeds together; *learned* means that its interval lies above 0. Two "
            "runs ran concurrently. The three seeds of the recipe before do not include the seeds that got stuck "
            "with it; of these, 0, 1 and 102 end at 94.5, 95.3 and 96.5 % with the shipped recipe."
        )
        report.text(WHY)
    report.picture("learning.png", lambda path: draw(found, path), "Training reward and held-out success of every run")
    return report


def _ends(runs: Sequence[Trained]) -> str:
    ends = sorted(r.after.success for r in runs)
    return f"the lowest at {ends[0]:.1%}, the median at {ends[len(ends) // 2]:.1%}"


WHY = """## Why seeds got stuck, and the fix

The eight wordings share one small model that cannot distinguish them in the first thirty steps. Division pays least at
first: for `+` and `*` the order of the operands does not matter, and a dividend has up to three digits to copy.
Therefore all wordings move away from `/` together, and how far depends on the first hundred tasks: 23 % of all training
tasks are divisions, but only 10 % of the first 80 with seed 0 and 17 % with seed 102, which both got stuck. When the
model distinguishes the wordings, it answers divisions with `*`, all attempts of such a group fail, their advantages are
0, and the run ends at 75 %.

Analyzed on 2026-11-23 with the same engine, trainer and order of tasks, without AgentScope (with a script that was not
kept; with another order of tasks none of seven seeds got stuck). Success on the held-out tasks after 250 steps, one run
each:

| 8 tasks x 8 attempts, except where noted | seed 0 | seed 102 |
|---|---:|---:|
| recipe before | 73.8 % | 75.4 % |
| `lr_warmup_steps: 25` instead of 5 | 98.4 % | 91.4 % |
| `lr_warmup_steps: 60` | 94.5 % | 82.8 % |
| `norm_adv_by_std: false` | 88.7 % | 72.3 % |
| temperature 2 for two of eight attempts | 71.5 % | 73.0 % |
| negative advantages for failed groups (NGRPO, weight 3), warm-up 25 | 86.3 % | 72.3 % |
| KL to the start in the loss, 0.02 | 94.9 % | 87.9 % |
| 16 tasks x 4 attempts | 96.5 % | 94.5 % |
| 16 x 4, `rloo` | 98.4 % | 77.3 % |
| 32 x 2 | 91.4 % | 75.4 % |
| 32 x 2, `reinforce_plus_plus` | 98.4 % | 74.2 % |
| 32 x 2, KL 0.02 | 94.5 % | 92.2 % |
| **16 x 4, KL 0.02** | 96.5 % | 95.3 % |

An entropy bonus only on the tokens of failed groups left seed 102 at 75.0 % (0.02) and 72.7 % (0.1); 0.3 broke both
tested seeds. A new algorithm was not needed. Three changes are enough: more tasks per step, whose mix varies less; KL
to the start, which slows and reverses the drift; and a longer warm-up. With two updates on each batch (`ppo_epochs: 2`)
180 steps achieve the result of 250: 11,520 episodes instead of 16,000, and episodes are most of a step's cost."""
