"""Federated averaging: in each round every client trains for a few steps on its own loader.

A client trains a copy of the server's model with a new optimizer, or, with `keep`, keeps its own model and optimizer.
"""

import copy
import sys

import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

steps, keeps, evaluates = int(sys.argv[1]), "keep" in sys.argv, "evaluate" in sys.argv
test_loader = DataLoader(Points(40), batch_size=8)
server = net()


class Client:
    def __init__(self):
        self.loader = DataLoader(Points(8 * steps), batch_size=8, shuffle=True)
        self.begin()

    def begin(self):
        self.model = copy.deepcopy(server)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def train(self):
        if keeps:
            self.model.load_state_dict(server.state_dict())
        else:
            self.begin()
        self.model.train()
        for x, y in watch.waits(self.loader):
            with watch("effective"):
                self.optimizer.zero_grad()
                cross_entropy(self.model(x), y).backward()
                self.optimizer.step()
        return self.model.state_dict()


clients = [Client() for _ in range(5)]
for _ in range(6):
    states = [client.train() for client in clients]
    with watch("other"):
        server.load_state_dict({key: sum(state[key] for state in states) / len(states) for key in states[0]})
    if evaluates:
        with watch("evaluation"), torch.no_grad():
            server.eval()
            print(sum(int((server(x).argmax(1) == y).sum()) for x, y in test_loader))
