import sys

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


def test_the_folder_is_that_of_rays_job(tmp_path, monkeypatch):
    """Two jobs into one folder do not answer each other."""

    class Ray:
        gcs_address = "10.0.0.1:6379"
        is_initialized = staticmethod(lambda: True)
        job = "01000000"

        @classmethod
        def get_runtime_context(cls):
            return cls

        @classmethod
        def get_job_id(cls):
            return cls.job

    monkeypatch.setitem(sys.modules, "ray", Ray)
    one = exchange_for(Options(run_dir=str(tmp_path))).folder
    assert one == tmp_path / "ranks-10.0.0.1-6379-01000000"
    assert exchange_for(Options(run_dir=str(tmp_path))).folder == one
    Ray.job = "02000000"
    assert exchange_for(Options(run_dir=str(tmp_path))).folder != one
    assert "02000000" in exchange_for(Options()).folder.name


def test_driver_and_workers_agree_on_the_folder(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert exchange_for(Options(run_dir=str(tmp_path))).folder == tmp_path / "ranks"
    assert exchange_for(Options()).folder == exchange_for(Options()).folder
    assert "dataproto-audit" in exchange_for(Options()).folder.name


def test_a_run_dir_that_is_a_file_has_its_folder_beside_it(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    taken = tmp_path / "run"
    taken.write_text("a file")
    exchange = exchange_for(Options(run_dir=str(taken)))
    assert exchange.folder == tmp_path / "run-ranks"
    exchange.ask(Asked("update_actor", 1, True))
    assert exchange_for(Options(run_dir=str(taken))).asked() == Asked("update_actor", 1, True)
    exchange.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
