from astuner_older.workflow import OlderWorkflow
from astuner.testing import check_workflow, workflow_task


def test_workflow():
    output = check_workflow(OlderWorkflow, workflow_task("What is 2 + 2?"), replies=["4"])
    assert output.metadata["final_answer"] == "4"
