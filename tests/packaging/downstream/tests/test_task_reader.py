from astuner_older.task_reader import OlderTaskReaderConfig, OlderTaskReader
from astuner.testing import check_task_reader


def test_task_reader():
    tasks = check_task_reader(OlderTaskReader(OlderTaskReaderConfig(count=10)))
    assert len(tasks) == 10
