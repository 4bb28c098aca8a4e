"""Programs that look closely print the same with headway and without: it changes nothing that they can see."""

import os
import textwrap
from pathlib import Path

import pytest
from running import plain, train

PROGRAMS = {
    "what functions tell of themselves": """
        import inspect, torch, typing
        from torch.utils.data import DataLoader, Dataset
        class Mine(Dataset):
            def __init__(self, root: str, split: str = "train"):
                self.root = root
        for function in (DataLoader.__init__, torch.load, torch.save, torch.nn.Module.load_state_dict, Mine.__init__):
            print(function.__name__, inspect.getfullargspec(function).args, [*inspect.signature(function).parameters])
            print(inspect.isfunction(function), inspect.getsourcefile(function) == inspect.getsourcefile(function))
        print(typing.get_type_hints(Mine.__init__), Mine("x").root)
        wanted = {"batch_size": 16, "lr": 1}
        known = inspect.getfullargspec(DataLoader.__init__).args
        print(DataLoader([1], **{k: v for k, v in wanted.items() if k in known}).batch_size)
        """,
    "another tool's patch": """
        import functools, torch
        calls, original = [], torch.nn.Module.train
        @functools.wraps(original)
        def mine(self, mode=True):
            calls.append(mode)
            return original(self, mode)
        torch.nn.Module.train = mine
        model = torch.nn.Linear(2, 2)
        for _ in range(2):
            model.eval()
            model.train()
        print(calls, torch.nn.Module.train is mine)
        from unittest import mock
        with mock.patch("torch.save") as save:
            torch.save(1, "x")
        print(save.called, torch.save.__name__)
        """,
    "exceptions of a signal handler": """
        import signal, torch
        class Stop(Exception):
            pass
        raised = caught = 0
        def handler(*args):
            global raised
            raised += 1
            raise Stop
        signal.signal(signal.SIGALRM, handler)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.step()
        for number in range(400):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0003)
                while raised == number:  # and not for some time: the signal may come later than any
                    optimizer.step()
                    model.to("cpu")
            except Stop:
                caught += 1
        print(raised, caught)
        """,
    "whole graphs": """
        import torch
        from torch._dynamo.utils import get_compilation_metrics
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.one, self.norm = torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)
            def forward(self, x):
                self.norm.eval()
                self.norm.train(False)
                self.one.to(x.dtype)
                return self.norm(self.one(x))
        model = Model()
        model.eval()
        for fullgraph in (True, False):
            torch._dynamo.reset()
            compiled = torch.compile(model, fullgraph=fullgraph, backend="eager")
            print(compiled(torch.ones(3, 2)).shape)
        print([metrics.co_name for metrics in get_compilation_metrics()])
        """,
    "where warnings point": """
        import torch, warnings
        from torch.utils.data import Dataset
        class Old(Dataset):
            def __init__(self):
                warnings.warn("old", DeprecationWarning, stacklevel=2)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.nn.Linear(1, 1).to(torch.complex64)
            torch.nn.Linear(1, 1).to(torch.complex64)
            Old()
        print([(w.lineno, w.filename == __file__) for w in seen])
        """,
    "classes that travel": """
        import cloudpickle, functools, pickle, subprocess, sys, torch
        from torch.utils.data import Dataset
        class Mine(Dataset):
            def __init__(self, size):
                self.size = size
            def __len__(self):
                return self.size
        class Decorated(Mine):
            @functools.wraps(Mine.__init__)
            def __init__(self, size):
                Mine.__init__(self, size + 1)
        sent = cloudpickle.dumps([Mine, Decorated, Mine(3)])
        code = "import pickle, sys; m, d, i = pickle.load(sys.stdin.buffer); print(len(m(1)), len(d(1)), len(i))"
        done = subprocess.run([sys.executable, "-I", "-c", code], input=sent, capture_output=True, text=False)
        print(done.stdout, done.stderr[-300:])
        """,
    "odd loaders": """
        import torch
        from torch.utils.data import DataLoader
        class Unhashable(DataLoader):
            __hash__ = None
            def __eq__(self, other):
                return True
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in Unhashable(torch.ones(8, 2), batch_size=2):
            model(batch).sum().backward()
            optimizer.step()
        print(model.weight.sum().item())
        try:
            for batch in DataLoader([1, "a"], batch_size=2):
                pass
        except TypeError as error:
            print(type(error), error.__context__, error.__cause__)
        """,
    "saving by keyword": """
        import os, torch
        torch.save(obj={"a": [0.5] * 1000}, f="a.pt")
        print(len(torch.load(f="a.pt")["a"]))
        from safetensors.torch import load_file, save_file
        save_file({"a": torch.ones(2)}, filename="a.safetensors")
        print(load_file(filename="a.safetensors"))
        """,
}


@pytest.mark.parametrize("what", PROGRAMS)
@pytest.mark.needs_package("cloudpickle", "safetensors")
def test_programs_print_the_same_with_and_without(home: Path, what: str) -> None:
    path = home / "program.py"
    path.write_text(textwrap.dedent(PROGRAMS[what]))
    settings = {"env": os.environ | {"OMP_NUM_THREADS": "1"}, "cwd": home}
    with_headway, without = train(str(path), **settings), plain(str(path), **settings)
    for done in (with_headway, without):
        assert done.returncode == 0, done.stderr
    assert "switched off" not in with_headway.stderr
    assert with_headway.stdout == without.stdout
