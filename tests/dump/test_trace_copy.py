"""Copies of what is told beside a batch: later changes of the original do not reach them."""

import numpy as np
import torch

from dataproto_audit.dump.trace_copy import copied


def test_containers_at_every_depth_are_copies():
    told = {"ranks": [{"rank": 0, "tokens": 3}, {"rank": 1, "micro": [1, 2]}], "kept": {"a": 1}}
    held = copied(told)
    told["ranks"][0]["tokens"] = 9
    told["ranks"][1]["micro"].append(3)
    told["kept"]["a"] = 9
    told["ranks"].append({})
    assert held == {
        "ranks": [{"rank": 0, "tokens": 3}, {"rank": 1, "micro": [1, 2]}],
        "kept": {"a": 1},
    }


def test_numbers_are_copied_where_asked():
    tensor, array = torch.ones(2), np.ones(2)
    held = copied({"t": tensor, "list": [array]})
    referred = copied({"t": tensor, "list": [array]}, numbers=False)
    tensor.zero_()
    array[:] = 0
    assert held["t"].tolist() == [1, 1]
    assert held["list"][0].tolist() == [1, 1]
    assert referred["t"] is tensor
    assert referred["list"][0] is array


def test_what_holds_itself_stays_so():
    told: dict = {"a": [1]}
    told["self"] = told
    held = copied(told)
    assert held is not told
    assert held["self"] is held


def test_objects_stay_references():
    thing = object()
    assert copied([thing, (thing,)]) == [thing, (thing,)]
