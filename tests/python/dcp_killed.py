"""Saves for ever, until it is killed: what `test_dcp.py` starts."""

import itertools
import sys
import warnings

import torch

from dcp_cases import Model, save

warnings.simplefilter("ignore")
model = Model()
for salt in itertools.count():
    print(salt, flush=True)
    model.fill(salt)
    save({"salt": salt, "a": torch.full((1 << 20,), float(salt))}, sys.argv[1], model)
