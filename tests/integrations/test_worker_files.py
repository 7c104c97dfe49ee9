import numpy as np

from dataproto_audit.integrations.options import Options
from dataproto_audit.integrations.worker_files import Answer, Asked, Exchange, exchange_for
from dataproto_audit.progress import Note


def test_what_is_told_arrives(tmp_path):
    driver, worker = Exchange(tmp_path / "ranks"), Exchange(tmp_path / "ranks")
    assert worker.asked() is None
    driver.ask(Asked("update_actor", 2, True))
    assert worker.asked() == Asked("update_actor", 2, True)
    worker.note(Note(1, 2, "update_actor", 3), 2)
    assert driver.notes() == [None, Note(1, 2, "update_actor", 3)]
    worker.answer(Answer({"call": 2, "rank": 1, "note": {"rows": 2}}, {"x": np.ones((2, 3))}))
    worker.answer(Answer({"call": 2, "rank": 0, "note": {"rows": 1}}, {}))
    first, second = driver.answers(2)
    assert (first.told["rank"], second.told["rank"]) == (0, 1)
    assert second.arrays["x"].tolist() == [[1, 1, 1], [1, 1, 1]]
    driver.close()
    assert worker.asked() is None


def test_answers_of_an_earlier_call_do_not_count(tmp_path):
    exchange = Exchange(tmp_path)
    exchange.ask(Asked("old_log_prob", 1, True))
    exchange.answer(Answer({"call": 1, "rank": 0}, {}))
    assert exchange.answers(2) == []
    exchange.ask(Asked("update_actor", 2, True))
    assert list(tmp_path.glob("answer-*")) == []
    exchange.remove()
    assert not tmp_path.exists()


def test_driver_and_workers_agree_on_the_folder(tmp_path):
    assert exchange_for(Options(run_dir=str(tmp_path))).folder == tmp_path / "ranks"
    assert exchange_for(Options()).folder == exchange_for(Options()).folder
    assert "dataproto-audit" in exchange_for(Options()).folder.name
