"""A trainer class as many write one: validation after each epoch, the best and the last model saved, early stopping."""

import logging
import sys

import torch
from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

logging.basicConfig(filename="train.log", level=logging.INFO)


class Trainer:
    def __init__(self, model, patience):
        self.model, self.patience = model, patience
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        self.loader = DataLoader(Points(160), batch_size=8, shuffle=True)
        self.validation = DataLoader(Points(80), batch_size=8)
        self.best, self.since = float("inf"), 0

    def train_epoch(self):
        self.model.train()
        for x, y in watch.waits(self.loader):
            with watch("effective"):
                self.optimizer.zero_grad()
                loss = cross_entropy(self.model(x), y)
                loss.backward()
                self.optimizer.step()
                logging.info("loss %.3f", loss.item())

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        return sum(cross_entropy(self.model(x), y).item() for x, y in self.validation)

    def fit(self, epochs):
        for epoch in range(epochs):
            self.train_epoch()
            with watch("evaluation"):
                loss = self.validate()
            with watch("checkpoint_blocking"):
                torch.save(self.model.state_dict(), "last.pt")
                if loss < self.best:
                    torch.save(self.model.state_dict(), "best.pt")
            watch.saved()
            self.since = 0 if loss < self.best else self.since + 1
            self.best = min(self.best, loss)
            if self.since > self.patience:
                print(f"stopped after epoch {epoch}")
                return


Trainer(net(), patience=int(sys.argv[1])).fit(4)
